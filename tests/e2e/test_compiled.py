"""Greedy tokens equal a plain vLLM's under torch.compile too: hooks still fire layer by layer."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from deploy.testbed import PlainVLLM, Platform
from tests.e2e.client import complete, prompt_tokens, random_prompt


@pytest.mark.timeout(900)
async def test_compiled_tokens_equal_plain(compiled: tuple[Platform, PlainVLLM], http: httpx.AsyncClient) -> None:
    platform, plain = compiled
    (decode,) = platform.names("decode")
    lengths = (1, 31, 32, 33, 300, 1000, 5000)
    prompts = [random_prompt(n, seed=n) for n in lengths]
    mixed = [random_prompt(20 + 97 * i, seed=8000 + i) for i in range(20)]
    expected = [await complete(http, plain.url, p) for p in prompts]
    before = prompt_tokens(platform, decode)
    got = [await complete(http, platform.url, p) for p in prompts]
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    expected = await asyncio.gather(*(complete(http, plain.url, p) for p in mixed))
    got = await asyncio.gather(*(complete(http, platform.url, p) for p in mixed))
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    spent = prompt_tokens(platform, decode) - before
    assert spent.local_compute <= len(prompts) + len(mixed)
