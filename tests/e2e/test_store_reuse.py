"""What prefill instance A computed is reused by B through the store, also when A is gone."""

from __future__ import annotations

import time

import httpx
import pytest

from deploy import topology
from deploy.testbed import PlainVLLM, Platform, sample, wait_for
from tests.e2e.client import complete, prompt_tokens, random_prompt

pytestmark = pytest.mark.timeout(400)
PIN = "x-mooncake-prefill-instance"
LENGTH = 5000
STORE_BLOCK = 256


async def ttft_s(
    http: httpx.AsyncClient, platform: Platform, prompt: list[int], prefill: str
) -> tuple[float, list[int]]:
    start = time.perf_counter()
    answer = await complete(http, platform.url, prompt, max_tokens=1, headers={PIN: prefill})
    assert answer.headers["x-mooncake-prefill-instance"] == prefill
    return time.perf_counter() - start, answer.token_ids


def saved_blocks(platform: Platform, name: str) -> float:
    return sample(platform.metrics(name), "mooncake_connector_store_saved_blocks_total")


def transferred(platform: Platform, name: str, op: str) -> float:
    return sample(platform.metrics(name), "mooncake_transfer_bytes_total", op=op)


async def fill_store(
    http: httpx.AsyncClient, platform: Platform, prompt: list[int], prefill: str
) -> tuple[float, list[int]]:
    before = saved_blocks(platform, prefill)
    cold = await ttft_s(http, platform, prompt, prefill)
    wait_for("A's saves", lambda: saved_blocks(platform, prefill) - before >= len(prompt) // STORE_BLOCK, 20)
    return cold


async def test_b_reuses_what_a_computed(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    a, b = platform.names("prefill")
    await ttft_s(http, platform, random_prompt(LENGTH, seed=1), b)  # B is warm in every other respect
    cold_s, warm_s = [], []
    for seed in (501, 502, 503):
        prompt = random_prompt(LENGTH, seed)
        expected = (await complete(http, plain.url, prompt, max_tokens=1)).token_ids
        cold, cold_tokens = await fill_store(http, platform, prompt, a)
        before = prompt_tokens(platform, b)
        warm, warm_tokens = await ttft_s(http, platform, prompt, b)
        spent = prompt_tokens(platform, b) - before
        assert cold_tokens == warm_tokens == expected
        assert spent.external_kv_transfer >= LENGTH // STORE_BLOCK * STORE_BLOCK
        assert spent.local_compute <= STORE_BLOCK
        cold_s.append(cold)
        warm_s.append(warm)
    assert min(warm_s) <= 0.5 * min(cold_s), f"cold {cold_s}, warm {warm_s}"
    # What the transfer engines inside vLLM moved, and what they see of the machine, is told by their hosts.
    moved = {(name, op): transferred(platform, name, op) for name in (a, b) for op in ("write", "read")}
    assert moved[a, "write"] > 0 and moved[b, "read"] > 0, moved
    state = platform.state()
    seen = {record.name: record.topology for record in await topology.published(state["etcd"], state["cluster"])}
    assert {a, b, *platform.names("decode"), *platform.names("store-node")} == seen.keys()
    assert all("cpu:0" in found.locations for found in seen.values())


async def test_b_reuses_after_a_is_gone(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    a, b = platform.names("prefill")
    prompt = random_prompt(LENGTH, seed=601)
    expected = (await complete(http, plain.url, prompt, max_tokens=16)).token_ids
    await fill_store(http, platform, prompt, a)
    old_pid = platform.kill(a)
    before = prompt_tokens(platform, b)
    answer = await complete(http, platform.url, prompt)
    spent = prompt_tokens(platform, b) - before
    assert answer.token_ids == expected
    assert spent.external_kv_transfer >= LENGTH // STORE_BLOCK * STORE_BLOCK
    platform.wait_restarted(a, old_pid)
