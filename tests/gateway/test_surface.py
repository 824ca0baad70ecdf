"""The HTTP surface: what is refused and how it is said; keys, limits, models, readiness."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mooncake.gateway.openai import Route, parse_call
from tests.gateway.conftest import Bed, eventually, make_bed
from tests.gateway.fakes import FakeWorker

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
BAD: dict[str, tuple[str, Any, int, str | None]] = {
    "invalid json": ("/v1/chat/completions", b'{"model": "tiny", "messages": [', 400, None),
    "invalid utf-8": ("/v1/completions", b'{"model": "\xff\xfe"}', 400, None),
    "deeply nested": ("/v1/completions", b"[" * 200_000, 400, None),
    "not an object": ("/v1/chat/completions", [1, 2], 400, None),
    "empty body": ("/v1/completions", b"", 400, None),
    "model is a number": ("/v1/chat/completions", CHAT | {"model": 5}, 400, "model"),
    "messages is a string": ("/v1/chat/completions", CHAT | {"messages": "hello"}, 400, "messages"),
    "no messages": ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages"),
    "messages missing": ("/v1/chat/completions", {"model": "tiny"}, 400, "messages"),
    "message is no object": ("/v1/chat/completions", CHAT | {"messages": ["x"]}, 400, "messages.0"),
    "message without role": ("/v1/chat/completions", CHAT | {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    "content is a number": (
        "/v1/chat/completions",
        CHAT | {"messages": [{"role": "user", "content": 5}]},
        400,
        "messages.0.content",
    ),
    "stream is a string": ("/v1/chat/completions", CHAT | {"stream": "perhaps"}, 400, "stream"),
    "stream_options without stream": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    "stream_options is a list": (
        "/v1/completions",
        COMPLETION | {"stream": True, "stream_options": [1]},
        400,
        "stream_options",
    ),
    "unknown model": ("/v1/chat/completions", CHAT | {"model": "gpt-9"}, 404, "model"),
    "prompt missing": ("/v1/completions", {"model": "tiny"}, 400, "prompt"),
    "empty prompt": ("/v1/completions", COMPLETION | {"prompt": []}, 400, "prompt"),
    "prompt is an object": ("/v1/completions", COMPLETION | {"prompt": {"a": 1}}, 400, "prompt"),
    "negative token id": ("/v1/completions", COMPLETION | {"prompt": [1, -5]}, 400, "prompt"),
    "huge token id": ("/v1/completions", COMPLETION | {"prompt": [1, 1 << 40]}, 400, "prompt"),
    "negative max_tokens": ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400, "max_tokens"),
    "zero max_completion_tokens": (
        "/v1/chat/completions",
        CHAT | {"max_completion_tokens": 0},
        400,
        "max_completion_tokens",
    ),
    "max_tokens is a string": ("/v1/completions", COMPLETION | {"max_tokens": "many"}, 400, "max_tokens"),
    "zero n": ("/v1/completions", COMPLETION | {"n": 0}, 400, "n"),
    "n is true": ("/v1/completions", COMPLETION | {"n": True}, 400, "n"),
    "too long": ("/v1/completions", COMPLETION | {"prompt": list(range(5000))}, 400, "input_tokens"),
    "no room for output": ("/v1/completions", COMPLETION | {"prompt": list(range(4096))}, 400, "input_tokens"),
    "unknown route": ("/v1/nonsense", COMPLETION, 404, None),
}


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["param"] == param
    assert "Traceback" not in response.text and ".py" not in response.text
    assert response.headers["x-mooncake-request-id"]
    return dict(error)


async def test_bad_input(bed: Bed) -> None:
    for case, (path, content, status, param) in BAD.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        response = await bed.http.post(path, content=raw, headers={"x-request-id": case})
        error = assert_error(response, status, param)
        assert response.headers["x-request-id"] == case
        if case == "too long":
            assert error["code"] == "context_length_exceeded"
    assert not any(w.decodes or w.prefills for w in bed.workers)
    assert bed.value("active_requests") == 0
    assert bed.value("requests_total", model="other", route="/v1/chat/completions", status="404") == 1
    assert (await bed.completion()).status_code == 200


async def test_methods_and_paths(bed: Bed) -> None:
    assert_error(await bed.http.get("/v1/completions"), 405)
    assert_error(await bed.http.delete("/v1/models"), 405)
    assert_error(await bed.http.get("/nowhere"), 404)
    assert_error(await bed.http.post("/tokenize", content=b"{"), 400)
    assert_error(await bed.http.post("/tokenize", json={"model": "no"}), 404, "model")


async def test_unknown_models_make_no_series(bed: Bed) -> None:
    for index in range(30):
        await bed.completion(model=f"nope-{index}")
    text = (await bed.http.get("/metrics")).text
    assert "nope-" not in text
    assert 'mooncake_gateway_requests_total{model="other",route="/v1/completions",status="404"} 30.0' in text


@pytest.mark.parametrize("framed", ["length", "chunked"])
async def test_body_limit(bed: Bed, framed: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * (1 << 20)

    content: Any = b"x" * (10 << 20) if framed == "length" else pieces()
    assert assert_error(await bed.http.post("/v1/completions", content=content), 413)["code"] == "request_too_large"
    assert (await bed.completion()).status_code == 200


async def test_keys() -> None:
    async with make_bed(api_keys=["secret", "other"]) as locked:
        assert assert_error(await locked.completion(), 401)["code"] == "missing_api_key"
        for header in ("Bearer wrong", "secret", "Basic secret", "Bearer"):
            assert_error(await locked.completion(headers={"authorization": header}), 401)
        for path in ("/v1/models", "/debug/trace/x", "/v1/nonsense"):
            assert_error(await locked.http.get(path), 401)
        for path in ("/health", "/ready", "/metrics"):
            assert (await locked.http.get(path)).status_code == 200
        for key in ("secret", "other"):
            assert (await locked.completion(headers={"authorization": f"Bearer {key}"})).status_code == 200
        assert locked.decodes[0].headers[0]["Authorization"] != "Bearer secret"


async def test_models(bed: Bed) -> None:
    listed = (await bed.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [("tiny", "model", 4096)]
    assert (await bed.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert_error(await bed.http.get("/v1/models/none"), 404, "model")


async def test_model_may_be_left_out_when_there_is_one(bed: Bed) -> None:
    answer = await bed.http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
    assert answer.status_code == 200
    assert bed.conductor.asked[0].model == "tiny"


async def test_adapters(bed: Bed) -> None:
    async with (
        FakeWorker("prefill-2", ("prefill",), "base", lora_adapters=["lora-a"]) as p,
        FakeWorker("decode-2", ("decode",), "base", lora_adapters=["lora-a"]) as d,
    ):
        for worker in (p, d):
            bed.gateway.directory.on_record("up", worker.record)
        bed.conductor.workers += [p, d]
        assert [m["id"] for m in (await bed.http.get("/v1/models")).json()["data"]] == ["base", "lora-a", "tiny"]
        assert (await bed.completion(model="lora-a")).status_code == 200
        asked = bed.conductor.asked[0]
        assert asked.model == "base"
        assert (p.prefills[0]["model"], d.decodes[0]["model"]) == ("lora-a", "lora-a")
        assert (await bed.completion(model="base")).status_code == 200
        assert bed.conductor.asked[1].block_keys != asked.block_keys


async def test_ready_and_health(bed: Bed) -> None:
    assert (await bed.http.get("/ready")).json() == {"ready": True, "models": {"tiny": {"prefill": 2, "decode": 2}}}
    assert (await bed.http.get("/health")).json()["status"] == "ok"
    for worker in bed.decodes:
        bed.gateway.directory.on_record("down", worker.record)
    assert (await bed.http.get("/ready")).status_code == 503
    bed.conductor.workers = []
    answer = await bed.completion()
    assert_error(answer, 503)
    assert answer.headers["retry-after"]
    for worker in bed.prefills:
        bed.gateway.directory.on_record("down", worker.record)
    assert_error(await bed.completion(), 503)


async def test_too_many_at_once() -> None:
    async with make_bed(max_concurrent_requests=1) as small:
        import asyncio

        small.decodes[0].decode_faults = ["wait"]
        first = asyncio.create_task(small.completion())
        await eventually("the first", lambda: small.decodes[0].running["decode"])
        answer = await small.completion()
        assert_error(answer, 429)
        assert answer.headers["retry-after"] and answer.headers["x-mooncake-dropped-reason"] == "rejected-saturated"
        small.decodes[0].resume.set()
        assert (await first).status_code == 200


async def test_bad_slo_header(bed: Bed) -> None:
    assert_error(await bed.completion(headers={"x-mooncake-ttft-slo-ms": "soon"}), 400, "x-mooncake-ttft-slo-ms")


@pytest.mark.parametrize(
    ("route", "more", "reason"),
    [
        (Route.CHAT, {}, None),
        (Route.CHAT, {"n": 3, "logprobs": True, "tools": [{}], "response_format": {"type": "json_object"}}, None),
        (Route.CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (
            Route.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "media",
        ),
        (Route.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]}, None),
        (Route.COMPLETIONS, {"prompt": ["one"]}, None),
        (Route.COMPLETIONS, {"prompt": [[1, 2]]}, None),
        (Route.COMPLETIONS, {"prompt": [[1], [2]]}, "several_prompts"),
        (Route.COMPLETIONS, {"best_of": 1}, None),
        (Route.COMPLETIONS, {"best_of": 2}, "beam_search"),
    ],
)
def test_single_worker_reasons(route: Route, more: dict[str, Any], reason: str | None) -> None:
    base = CHAT if route is Route.CHAT else COMPLETION
    assert parse_call(route, json.dumps(base | more).encode()).single_worker_reason == reason


@pytest.mark.parametrize(("more", "limit"), [({}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 0, "echo": True}, 0)])
def test_output_limits(more: dict[str, Any], limit: int) -> None:
    body = {"model": "tiny", "prompt": "x"} | more
    assert parse_call(Route.COMPLETIONS, json.dumps(body).encode()).max_output_tokens == limit


async def test_client_gone_in_the_middle_of_its_body(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    host, port = bed.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.1)
    assert (await bed.completion()).status_code == 200
    assert not [r for r in caplog.records if r.exc_info]
