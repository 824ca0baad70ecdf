"""Legs that fail, at each stage: the request goes on elsewhere, or ends with an error in time; nothing stays held."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from mooncake.common.proto import conductor_pb2 as pb
from tests.gateway.conftest import Bed, eventually, make_bed
from tests.gateway.fakes import WORDS, FakeConductor

TEXT = "".join(WORDS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "fault", ["status500", "status503", "status404", "die before start", "end early", "die after start", "error500"]
)
async def test_prefill_fails(bed: Bed, fault: str, stream: bool) -> None:
    bed.prefills[0].prefill_faults = [fault]
    if fault == "die after start":
        bed.decodes[0].decode_faults = ["silent"]
    answer = await bed.completion(stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-mooncake-prefill-instance"] == "prefill-1"
    first, second = (r.exclude_instances for r in bed.conductor.asked)
    assert (list(first), list(second)) == ([], [bed.prefills[0].instance_id])
    ids = {p["kv_transfer_params"]["mooncake"]["transfer_id"] for w in bed.prefills for p in w.prefills}
    assert len(ids) == 2
    request_id = answer.headers["x-mooncake-request-id"]
    await eventually("the reports", lambda: pb.FINISHED in bed.conductor.kinds(request_id))
    assert bed.conductor.kinds(request_id).count(pb.FINISHED) == 1
    (failed,) = [e for e in bed.conductor.events if e.kind == pb.LEG_FAILED]
    assert failed.instance_id == bed.prefills[0].instance_id
    assert bed.value("retries_total", leg="prefill") == 1
    await eventually("idle", bed.idle)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", ["status500", "status502", "status401", "die before"])
async def test_decode_fails_before_the_first_byte(bed: Bed, fault: str, stream: bool) -> None:
    bed.decodes[0].decode_faults = [fault]
    answer = await bed.completion(stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-mooncake-decode-instance"] == "decode-1"
    lost = bed.decodes[0].decodes[0]["kv_transfer_params"]["mooncake"]["transfer_id"]
    await eventually("the release", lambda: lost in bed.prefills[0].released)
    await eventually("idle", bed.idle)
    assert bed.prefills[0].released == [lost]


async def test_error_event_before_the_first_byte_is_retried(bed: Bed) -> None:
    bed.decodes[0].decode_faults = ["error event500"]
    answer = await bed.completion(stream=True)
    assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
    assert answer.headers["x-mooncake-decode-instance"] == "decode-1"


async def test_decoding_goes_on_when_only_the_prefill_is_lost(bed: Bed) -> None:
    """The decoding side had its answer before the prefill leg broke: it needs nobody any more."""
    bed.prefills[0].prefill_faults = ["prefilling"]
    bed.decodes[0].token_s = 0.05
    call = asyncio.create_task(bed.completion(stream=True, stream_options={"include_usage": True}))
    await eventually("decoding", lambda: bed.decodes[0].running["decode"])
    await asyncio.sleep(0.1)
    bed.gateway.directory.on_record("down", bed.prefills[0].record)
    answer = await call
    assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
    assert json.loads(answer.text.split("data: ")[-2])["usage"]["prompt_tokens_details"] == {"cached_tokens": 99}


@pytest.mark.parametrize("fault", ["die mid", "end mid", "stall", "no done"])
async def test_decode_fails_in_the_stream(bed: Bed, fault: str) -> None:
    bed.decodes[0].decode_faults = [fault]
    answer = await bed.completion(stream=True)
    assert answer.status_code == 200
    *events, last, done, empty = answer.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] and error["type"] == "upstream_error" and error["code"] == 502
    said = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events]
    assert said == (WORDS if fault == "no done" else WORDS[:3])
    await eventually("idle", bed.idle)
    await eventually("the release", lambda: len(bed.prefills[0].released) == 1)
    assert len(bed.conductor.asked) == 1


@pytest.mark.parametrize("where", ["prefill", "decode", "decode stream"])
async def test_engine_4xx_is_passed_on(bed: Bed, where: str) -> None:
    if where == "prefill":
        bed.prefills[0].prefill_faults = ["error400"]
    else:
        bed.decodes[0].decode_faults = ["error event400" if where == "decode stream" else "status400"]
    answer = await bed.completion(stream=where == "decode stream")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] in ("bad prompt", "engine says no", "broken")
    assert len(bed.conductor.asked) == 1
    assert not bed.gateway.directory.circuits._breakers
    await eventually("idle", bed.idle)
    await eventually("the release", lambda: len(bed.prefills[0].released) == 1)


async def test_retries_are_bounded() -> None:
    async with make_bed(max_retries=1) as impatient:
        for worker in impatient.prefills:
            worker.prefill_faults = ["status500"] * 5
        answer = await impatient.completion()
        assert answer.status_code == 502 and answer.json()["error"]["type"] == "upstream_error"
        assert [len(w.prefills) for w in impatient.prefills] == [1, 1]
        await eventually("idle", impatient.idle)


async def test_nobody_left(bed: Bed) -> None:
    for worker in bed.decodes:
        worker.decode_faults = ["die before"] * 5
    answer = await bed.completion()
    assert answer.status_code == 503
    assert (
        answer.headers["retry-after"] == "3" and answer.headers["x-mooncake-dropped-reason"] == "rejected-no-endpoints"
    )
    await eventually("idle", bed.idle)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["queued", "prefilling", "silent", "decoding"])
async def test_client_gone(bed: Bed, stage: str, stream: bool) -> None:
    prefill, decode = bed.prefills[0], bed.decodes[0]
    if stage in ("queued", "prefilling"):
        prefill.prefill_faults = [stage]
        decode.decode_faults = ["silent"]
    else:
        decode.decode_faults = ["silent" if stage == "silent" else "stall" if stream else "wait"]
    call = asyncio.create_task(bed.completion(stream=stream))
    busy = prefill if stage == "queued" else decode
    await eventually("the stage", lambda: busy.running["prefill" if stage == "queued" else "decode"])
    await asyncio.sleep(0.05)
    assert bed.value("active_requests") == 1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    start = time.monotonic()
    await eventually("idle", bed.idle)
    assert time.monotonic() - start < 1
    await eventually("the release", lambda: len(prefill.released) == 1)
    assert bed.value("disconnected_clients_total") == 1
    await eventually("the report", lambda: any(e.kind == pb.FINISHED for e in bed.conductor.events))


async def test_client_gone_while_placing(bed: Bed) -> None:
    bed.conductor.delay_s = 0.5
    call = asyncio.create_task(bed.completion())
    await eventually("placing", lambda: bed.conductor.asked)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await eventually("idle", bed.idle, 0.3)
    assert not any(w.prefills or w.decodes for w in bed.workers)


async def test_two_hundred_aborts(bed: Bed) -> None:
    for worker in bed.workers:
        worker.token_s = 0.002
        worker.prefill_s = 0.01

    async def go_away(index: int) -> None:
        call = asyncio.create_task(bed.completion(stream=index % 2 == 0))
        await asyncio.sleep(0.0005 * (index % 50))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    for start in range(0, 200, 20):
        await asyncio.gather(*(go_away(i) for i in range(start, start + 20)))
    await eventually("idle", bed.idle)
    assert (await bed.completion()).status_code == 200


async def test_deadline() -> None:
    async with make_bed(request_deadline_s=0.5) as short:
        short.prefills[0].prefill_faults = ["queued"]
        answer = await short.completion()
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"
        short.decodes[0].decode_faults = ["stall"]
        answer = await short.completion(stream=True)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and '"code":504' in answer.text
        await eventually("idle", short.idle)
        await eventually("the releases", lambda: len(short.prefills[0].released) == 2)


async def test_worker_vanishes_without_a_word(bed: Bed) -> None:
    """No reset, no end: only the registry tells that it is gone."""
    bed.prefills[0].prefill_faults = ["queued"]
    call = asyncio.create_task(bed.completion())
    await eventually("the prefill leg", lambda: bed.prefills[0].running["prefill"])
    bed.gateway.directory.on_record("down", bed.prefills[0].record)
    bed.conductor.workers.remove(bed.prefills[0])
    assert (await call).headers["x-mooncake-prefill-instance"] == "prefill-1"


async def test_silent_decode_worker_vanishes(bed: Bed) -> None:
    bed.decodes[0].decode_faults = ["silent"]
    call = asyncio.create_task(bed.completion())
    await eventually("the decoding leg", lambda: bed.decodes[0].running["decode"])
    bed.gateway.directory.on_record("down", bed.decodes[0].record)
    assert (await call).headers["x-mooncake-decode-instance"] == "decode-1"


async def test_breaker_avoids_and_tries_again() -> None:
    async with make_bed(circuit_failures=2, circuit_open_s=0.3, max_retries=1) as careful:
        bad = careful.prefills[0]
        bad.prefill_faults = ["status503"] * 2
        for _ in range(2):
            assert (await careful.completion()).status_code == 200
        assert bad.instance_id in careful.gateway.directory.circuits.open(time.monotonic())
        assert careful.value("circuit_open", instance=bad.instance_id) == 1
        await careful.completion()
        assert list(careful.conductor.asked[-1].exclude_instances) == [bad.instance_id]
        assert len(bad.prefills) == 2
        await asyncio.sleep(0.35)
        assert (await careful.completion()).headers["x-mooncake-prefill-instance"] == "prefill-0"
        assert not careful.gateway.directory.circuits._breakers


# --- the Conductor ---------------------------------------------------------------------------------------------------


async def test_rejection(bed: Bed) -> None:
    bed.conductor.rejection = pb.Rejection(status=429, reason="rejected-saturated", message="busy", retry_after_s=2.2)
    answer = await bed.completion()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3" and answer.headers["x-mooncake-dropped-reason"] == "rejected-saturated"
    assert answer.json()["error"] == {"message": "busy", "type": "rate_limit_error", "param": None, "code": None}
    assert bed.value("rejections_total", reason="rejected-saturated") == 1


async def test_conductor_dies_and_comes_back(bed: Bed) -> None:
    await bed.conductor.stop()
    answers = await asyncio.gather(*(bed.completion() for _ in range(8)))
    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-mooncake-prefill-instance"] for a in answers} == {"prefill-0", "prefill-1"}
    assert {a.headers["x-mooncake-decode-instance"] for a in answers} == {"decode-0", "decode-1"}
    assert bed.value("placement_fallback_total", reason="unavailable") == 8
    again = FakeConductor(bed.workers)
    await again.start("cluster-token", bed.conductor.address)
    try:
        await eventually("the reports", lambda: sum(e.kind == pb.FINISHED for e in again.events) == 8)
        await bed.completion()
        assert len(again.asked) == 1
    finally:
        await again.stop()


async def test_slow_conductor_is_waited_for_once(bed: Bed) -> None:
    bed.conductor.delay_s = 5
    start = time.monotonic()
    assert (await bed.completion()).status_code == 200
    assert (await bed.completion()).status_code == 200
    assert time.monotonic() - start < 1.8
    assert len(bed.conductor.asked) == 1


async def test_conductor_that_knows_no_workers_yet(bed: Bed) -> None:
    bed.conductor.workers = []
    assert (await bed.completion()).status_code == 200
    assert bed.value("placement_fallback_total", reason="conductor-knows-none") == 1


async def test_placed_on_a_worker_that_the_registry_does_not_know(bed: Bed) -> None:
    bed.gateway.directory.on_record("down", bed.prefills[0].record)
    answer = await bed.completion()
    assert answer.status_code == 200 and answer.headers["x-mooncake-prefill-instance"] == "prefill-1"
    assert bed.value("placement_fallback_total", reason="stale-placement") == 1


async def test_silent_stream_ends_when_its_worker_is_known_to_be_gone() -> None:
    async with make_bed(stream_idle_timeout_s=30) as patient:
        patient.decodes[0].decode_faults = ["stall"]
        call = asyncio.create_task(patient.completion(stream=True))
        await eventually("decoding", lambda: patient.decodes[0].running["decode"])
        await asyncio.sleep(0.1)
        patient.gateway.directory.on_record("down", patient.decodes[0].record)
        answer = await asyncio.wait_for(call, 2)
        assert answer.text.endswith("data: [DONE]\n\n") and "its worker is gone" in answer.text
