"""A client that goes away, at whatever stage, leaves nothing behind."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from deploy.testbed import PlainVLLM, Platform, wait_for
from tests.e2e.client import body, complete, gateway_active, held, random_prompt

CLEAN_WITHIN_S = 5
ABORTS = 200


async def go_away(platform: Platform, prompt: list[int], after_s: float, stream: bool, max_tokens: int = 400) -> None:
    """Starts a request on a connection of its own and closes it `after_s` later."""
    async with httpx.AsyncClient(timeout=60) as client:
        call = asyncio.create_task(
            client.post(platform.url + "/v1/completions", json=body(prompt, max_tokens, stream=stream))
        )
        await asyncio.sleep(after_s)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def assert_clean(platform: Platform, within_s: float = CLEAN_WITHIN_S) -> None:
    wait_for("the gateway to have no active request", lambda: gateway_active(platform) == 0, within_s, 0.1)
    for name in platform.names("prefill") + platform.names("decode"):
        try:
            wait_for(f"{name} to hold nothing", lambda name=name: not held(platform, name), within_s, 0.1)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {held(platform, name)}") from None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", ["placing", "prefilling", "transferring", "decoding"])
async def test_client_gone(platform: Platform, stage: str, stream: bool) -> None:
    after_s = {"placing": 0.003, "prefilling": 0.25, "transferring": 0.05, "decoding": 1.5}[stage]
    length = {"placing": 2000, "prefilling": 6000, "transferring": 300, "decoding": 200}[stage]
    for attempt in range(3):
        await go_away(platform, random_prompt(length, seed=length * 10 + attempt * 2 + stream), after_s, stream)
    assert_clean(platform)


async def test_client_gone_while_queued(platform: Platform) -> None:
    busy = [go_away(platform, random_prompt(6000, seed=900 + i), 1.0, True) for i in range(6)]
    queued = [go_away(platform, random_prompt(3000, seed=950 + i), 0.5, i % 2 == 0) for i in range(10)]
    await asyncio.gather(*busy, *queued)
    assert_clean(platform)


@pytest.mark.timeout(300)
async def test_two_hundred_aborts_leave_the_idle_state(
    platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient
) -> None:
    for index in range(ABORTS):
        await go_away(
            platform, random_prompt(40 + 23 * (index % 40), seed=index), 0.01 + 0.004 * (index % 50), index % 2 == 0
        )
    assert_clean(platform)
    await asyncio.sleep(2)
    cpu, start = platform.cpu_seconds(), time.monotonic()
    await asyncio.sleep(5)
    busy = (platform.cpu_seconds() - cpu) / (time.monotonic() - start)
    assert busy < 0.5, f"the idle platform uses {busy:.2f} cores"
    prompt = random_prompt(333, seed=77)
    assert (await complete(http, platform.url, prompt)).token_ids == (await complete(http, plain.url, prompt)).token_ids
