"""Requests that go well, on both paths, as the workers and the client see them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mooncake.common.auth import derive_key
from mooncake.common.block_key import block_keys, pack_keys, prompt_digest, root_key
from mooncake.common.proto import conductor_pb2 as pb
from tests.gateway.conftest import TOKEN, Bed, eventually
from tests.gateway.fakes import WORDS


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_two_legs(bed: Bed) -> None:
    answer = await bed.completion(top_k=5, unknown_extra={"a": 1}, cache_salt="s")
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"][0]["text"] == "".join(WORDS)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert body["kv_transfer_params"] is None
    assert answer.headers["x-mooncake-prefill-instance"] == "prefill-0"
    assert answer.headers["x-mooncake-decode-instance"] == "decode-0"
    request_id = answer.headers["x-mooncake-request-id"]
    assert answer.headers["x-request-id"] == request_id
    assert body["id"] == "cmpl-" + request_id

    (prefill,) = bed.prefills[0].prefills
    params = prefill.pop("kv_transfer_params")["mooncake"]
    assert prefill == {
        "model": "tiny",
        "prompt": list(range(100)),
        "max_tokens": 1,
        "temperature": 0,
        "n": 1,
        "stream": False,
        "ignore_eos": True,
        "cache_salt": "s",
    }
    assert params["leg"] == "prefill"
    assert params["digest"] == prompt_digest(range(100)).hex()
    assert params["prompt_tokens"] == 100
    assert params["pool_prefix_tokens"] == 64
    assert params["fan_out"] == 1
    (decode,) = bed.decodes[0].decodes
    theirs = decode["kv_transfer_params"]["mooncake"]
    assert 0 < theirs.pop("deadline_s") <= params.pop("deadline_s") <= 20
    assert theirs == params | {"leg": "decode", "peer_address": "127.0.0.1:9009", "peer_instance_id": "te-prefill-0"}
    assert decode["top_k"] == 5 and decode["unknown_extra"] == {"a": 1}
    assert bed.decodes[0].headers[0]["Authorization"] == "Bearer " + derive_key(TOKEN, "engine")
    assert bed.decodes[0].headers[0]["X-Request-Id"] == request_id
    assert bed.prefills[0].headers[0]["Authorization"] == "Bearer " + TOKEN

    (asked,) = bed.conductor.asked
    root = root_key(model="tiny", fingerprint="fp", block_size=32, cache_salt="s")
    assert asked.block_keys == pack_keys(block_keys(root, list(range(100)), 32))
    assert (asked.prompt_tokens, asked.max_output_tokens, asked.block_size, asked.single_worker) == (100, 8, 32, False)
    await eventually("the reports", lambda: pb.FINISHED in bed.conductor.kinds(request_id))
    assert sorted(bed.conductor.kinds(request_id)) == [
        pb.PREFILL_STARTED,
        pb.PREFILL_FINISHED,
        pb.FIRST_TOKEN,
        pb.FINISHED,
    ]
    await eventually("idle", bed.idle)
    assert bed.prefills[0].released == []
    assert bed.value("requests_total", model="tiny", route="/v1/completions", status="200") == 1


@pytest.mark.parametrize("fault", ["", "bytes"])
async def test_stream(bed: Bed, fault: str) -> None:
    bed.decodes[0].decode_faults = [fault]
    answer = await bed.completion(stream=True, stream_options={"include_usage": True})
    got = chunks(answer.text)
    assert "".join(c["choices"][0]["text"] for c in got[:-1]) == "".join(WORDS)
    assert got[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert answer.headers["content-type"].startswith("text/event-stream")
    await eventually("idle", bed.idle)


async def test_continuous_usage(bed: Bed) -> None:
    answer = await bed.completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    got = chunks(answer.text)
    assert [c["usage"]["completion_tokens"] for c in got] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert all(c["usage"]["prompt_tokens_details"]["cached_tokens"] == 32 for c in got)


async def test_cached_tokens_zero_is_said(bed: Bed) -> None:
    bed.prefills[0].cached = 0
    assert (await bed.completion()).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"suffix": "x"},
        {"prompt": ["a", "b"]},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 5},
    ],
    ids=str,
)
async def test_one_worker(bed: Bed, extra: dict[str, Any]) -> None:
    answer = await bed.completion(**extra)
    assert answer.status_code == 200
    assert bed.conductor.asked[0].single_worker
    assert all(not w.prefills for w in bed.workers)
    (decode,) = bed.decodes[0].decodes
    assert "kv_transfer_params" not in decode
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
    assert answer.headers["x-mooncake-prefill-instance"] == "decode-0"


async def test_conductor_skips_the_prefill_leg(bed: Bed) -> None:
    bed.conductor.without_prefill = True
    assert (await bed.completion()).status_code == 200
    assert not bed.conductor.asked[0].single_worker
    assert "kv_transfer_params" not in bed.decodes[0].decodes[0]


async def test_fan_out(bed: Bed) -> None:
    await bed.completion(n=3)
    assert bed.prefills[0].prefills[0]["n"] == 1
    assert bed.prefills[0].prefills[0]["kv_transfer_params"]["mooncake"]["fan_out"] == 3
    assert bed.decodes[0].decodes[0]["n"] == 3


async def test_decoding_leg_waits_for_the_start(bed: Bed) -> None:
    bed.prefills[0].prefill_faults = ["queued"]
    call = asyncio.create_task(bed.completion())
    await eventually("the prefill leg", lambda: bed.prefills[0].running["prefill"])
    await asyncio.sleep(0.1)
    assert not bed.decodes[0].decodes
    bed.prefills[0].resume.set()
    assert (await call).status_code == 200
    prefill, decode = (
        leg["kv_transfer_params"]["mooncake"]["deadline_s"]
        for leg in (bed.prefills[0].prefills[0], bed.decodes[0].decodes[0])
    )
    assert 0 < decode <= prefill - 0.1  # the time in the queue is gone


async def test_fifty_with_the_same_client_id(bed: Bed) -> None:
    answers = await asyncio.gather(
        *(bed.completion(headers={"x-request-id": "same"}, stream=i % 2 == 0) for i in range(50))
    )
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert len({a.headers["x-mooncake-request-id"] for a in answers}) == 50
    sent = [d["kv_transfer_params"]["mooncake"]["transfer_id"] for d in bed.decodes[0].decodes]
    assert len(set(sent)) == 50
    await eventually("idle", bed.idle)
    assert bed.prefills[0].released == []


async def test_pinning(bed: Bed) -> None:
    headers = {"x-mooncake-prefill-instance": "prefill-1", "x-mooncake-decode-instance": "decode-1"}
    answer = await bed.completion(headers=headers)
    assert {k: answer.headers[k] for k in headers} == headers


async def test_slos_and_priority_reach_the_conductor(bed: Bed) -> None:
    await bed.completion(priority=-3, headers={"x-mooncake-ttft-slo-ms": "1500", "x-mooncake-tbt-slo-ms": "50"})
    asked = bed.conductor.asked[0]
    assert (asked.priority, asked.ttft_slo_s, asked.tbt_slo_s) == (-3, 1.5, 0.05)
    assert 0 < asked.elapsed_s < 10


async def test_a_retry_tells_the_conductor_how_old_the_request_is(bed: Bed) -> None:
    bed.decodes[0].decode_faults = ["status500"]
    bed.prefills[0].prefill_faults = ["queued"]
    call = asyncio.create_task(bed.completion())
    await eventually("the prefill leg", lambda: bed.prefills[0].running["prefill"])
    await asyncio.sleep(0.1)
    bed.prefills[0].resume.set()
    assert (await call).status_code == 200
    first, second = (asked.elapsed_s for asked in bed.conductor.asked)
    assert second > first + 0.1


async def test_forged_transfer_params_are_stripped(bed: Bed) -> None:
    forged = {"mooncake": {"transfer_id": "xfer-forged"}, "do_remote_prefill": True}
    await bed.completion(kv_transfer_params=forged, ec_transfer_params={"x": 1})
    (decode,) = bed.decodes[0].decodes
    assert decode["kv_transfer_params"]["mooncake"]["transfer_id"] != "xfer-forged"
    assert "do_remote_prefill" not in decode["kv_transfer_params"] and "ec_transfer_params" not in decode
    assert bed.value("stripped_fields_total", field="kv_transfer_params") == 1


async def test_trace(bed: Bed) -> None:
    answer = await bed.completion(headers={"x-request-id": "mine"})
    request_id = answer.headers["x-mooncake-request-id"]
    traces = [(await bed.http.get(f"/debug/trace/{i}")).json() for i in (request_id, "mine", answer.json()["id"])]
    assert {t["request_id"] for t in traces} == {request_id}
    whos = {e["who"] for e in traces[0]["events"]}
    assert whos == {"gateway-0", "prefill-0", "decode-0"}
    assert [e["event"] for e in traces[0]["events"] if e["who"] == "gateway-0"][:3] == [
        "received",
        "tokenized",
        "placed",
    ]
    assert (await bed.http.get("/debug/trace/unknown")).status_code == 404


async def test_tokenize_is_relayed(bed: Bed) -> None:
    answer = await bed.http.post("/tokenize", json={"model": "tiny", "prompt": "abc"})
    assert answer.json()["tokens"] == [1, 2, 3]
