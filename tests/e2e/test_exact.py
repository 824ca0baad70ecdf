"""Greedy tokens equal a plain vLLM's, and the decoding engine computed at most the last prompt token."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from deploy.testbed import PlainVLLM, Platform
from tests.e2e.client import complete, prompt_tokens, random_prompt

LENGTHS = (1, 31, 32, 33, 300, 1000, 5000)


@pytest.mark.parametrize("length", LENGTHS)
async def test_tokens_equal_plain(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient, length: int) -> None:
    (decode,) = platform.names("decode")
    prompt = random_prompt(length, seed=length)
    expected = await complete(http, plain.url, prompt)
    before = prompt_tokens(platform, decode)
    got = await complete(http, platform.url, prompt)
    spent = prompt_tokens(platform, decode) - before
    assert got.token_ids == expected.token_ids
    assert got.usage["prompt_tokens"] == length
    assert spent.local_compute <= 1, f"the decoding engine computed {spent.local_compute} prompt tokens"
    assert spent.external_kv_transfer >= length - 1


async def test_twenty_concurrent(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    (decode,) = platform.names("decode")
    prompts = [
        random_prompt(length, seed=7000 + i)
        for i, length in enumerate([5, 31, 64, 65, 130, 257, 400, 777, 1500, 3000] * 2)
    ]
    expected = await asyncio.gather(*(complete(http, plain.url, p) for p in prompts))
    before = prompt_tokens(platform, decode)
    got = await asyncio.gather(*(complete(http, platform.url, p) for p in prompts))
    spent = prompt_tokens(platform, decode) - before
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    assert spent.local_compute <= len(prompts)
    assert spent.external_kv_transfer >= sum(len(p) - 1 for p in prompts)
