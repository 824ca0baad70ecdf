"""Bad input gets the right 4xx in OpenAI's shape, and the platform is as before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deploy.testbed import PlainVLLM, Platform, wait_for
from tests.e2e.client import body, complete, gateway_active, held, random_prompt

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

CASES: dict[str, tuple[str, Any, int]] = {
    "invalid json": ("/v1/chat/completions", b'{"model": "tiny", "messages": [', 400),
    "not an object": ("/v1/chat/completions", [1, 2], 400),
    "empty body": ("/v1/completions", b"", 400),
    "model is a number": ("/v1/chat/completions", CHAT | {"model": 5}, 400),
    "messages is a string": ("/v1/chat/completions", CHAT | {"messages": "hello"}, 400),
    "message without role": ("/v1/chat/completions", CHAT | {"messages": [{"content": "x"}]}, 400),
    "stream is a string": ("/v1/chat/completions", CHAT | {"stream": "perhaps"}, 400),
    "unknown model": ("/v1/chat/completions", CHAT | {"model": "gpt-9"}, 404),
    "no messages": ("/v1/chat/completions", CHAT | {"messages": []}, 400),
    "messages missing": ("/v1/chat/completions", {"model": "tiny"}, 400),
    "prompt missing": ("/v1/completions", {"model": "tiny"}, 400),
    "negative max_tokens": ("/v1/chat/completions", CHAT | {"max_tokens": -1}, 400),
    "zero n": ("/v1/chat/completions", CHAT | {"n": 0}, 400),
    "temperature below zero": ("/v1/chat/completions", CHAT | {"temperature": -1}, 400),
    "too long prompt": ("/v1/completions", {"model": "tiny", "prompt": random_prompt(9000, 1), "max_tokens": 4}, 400),
    "token id outside of the vocabulary": (
        "/v1/completions",
        {"model": "tiny", "prompt": [10, 999999], "max_tokens": 4},
        400,
    ),
    "bad response_format": ("/v1/chat/completions", CHAT | {"response_format": {"type": "nonsense"}}, 400),
    "10 MB body": ("/v1/completions", {"model": "tiny", "prompt": "x" * (10 << 20)}, 413),
    "unknown route": ("/v1/nonsense", {"model": "tiny"}, 404),
}


def assert_openai_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    assert "Traceback" not in response.text


@pytest.mark.parametrize("case", CASES)
async def test_bad_input(platform: Platform, http: httpx.AsyncClient, case: str) -> None:
    path, content, status = CASES[case]
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    response = await http.post(platform.url + path, content=raw, headers={"content-type": "application/json"})
    assert_openai_error(response, status)


async def test_wrong_method(platform: Platform, http: httpx.AsyncClient) -> None:
    assert_openai_error(await http.get(platform.url + "/v1/completions"), 405)


async def test_client_sent_transfer_params_are_stripped(
    platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient
) -> None:
    prompt = random_prompt(100, seed=3)
    forged = {
        "mooncake": {"leg": "decode", "transfer_id": "xfer-forged", "peer_address": "127.0.0.1:9"},
        "do_remote_prefill": True,
    }
    expected = await complete(http, plain.url, prompt)
    got = await complete(http, platform.url, prompt, kv_transfer_params=forged)
    assert got.token_ids == expected.token_ids
    response = await http.post(platform.url + "/v1/completions", json=body(prompt, 4, kv_transfer_params=forged))
    assert "kv_transfer_params" not in {k for k, v in response.json().items() if v is not None}


async def test_platform_is_as_before(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    prompt = random_prompt(64, seed=4)
    assert (await complete(http, platform.url, prompt)).token_ids == (await complete(http, plain.url, prompt)).token_ids
    wait_for("no active request", lambda: gateway_active(platform) == 0, 10)
    for name in platform.names("prefill") + platform.names("decode"):
        wait_for(f"{name} idle", lambda name=name: not held(platform, name), 10)
