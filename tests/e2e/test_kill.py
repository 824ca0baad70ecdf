"""Any role may be killed with `kill -9`; requests are retried, or end with an error in time, or never notice."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from deploy.testbed import PlainVLLM, Platform, wait_for
from tests.e2e.client import Completion, body, complete, prompt_tokens, random_prompt
from tests.e2e.test_abort import assert_clean

pytestmark = pytest.mark.timeout(400)
PIN = "x-mooncake-prefill-instance"


async def check_answers(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient, seeds: range) -> None:
    """Requests sent now are answered correctly."""
    for seed in seeds:
        prompt = random_prompt(200 + 37 * (seed % 10), seed)
        expected = await complete(http, plain.url, prompt)
        assert (await complete(http, platform.url, prompt)).token_ids == expected.token_ids


async def test_prefill_worker_killed_at_work(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    victim, other = platform.names("prefill")
    prompts = [random_prompt(6000, seed=3000 + i) for i in range(3)]
    bystanders = [random_prompt(200, seed=3100 + i) for i in range(3)]
    expected = [await complete(http, plain.url, p) for p in (*prompts, *bystanders)]
    calls = [asyncio.create_task(complete(http, platform.url, p)) for p in prompts]
    others = [asyncio.create_task(complete(http, platform.url, p, headers={PIN: other})) for p in bystanders]
    await asyncio.sleep(0.6)
    old_pid = platform.kill(victim)
    got = await asyncio.wait_for(asyncio.gather(*calls, *others), 120)
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]

    platform.wait_restarted(victim, old_pid)

    async def used_again() -> Completion:
        return await complete(
            http, platform.url, random_prompt(300, seed=int(time.time() * 1000) % 10**6), headers={PIN: victim}
        )

    deadline = time.monotonic() + 30
    while True:
        answer = await used_again()
        if answer.headers.get(PIN) == victim:
            break
        assert time.monotonic() < deadline, "the restarted prefill worker is not used"
    assert prompt_tokens(platform, victim).local_compute >= 300
    assert_clean(platform)


async def test_decode_worker_killed_mid_stream(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    (victim,) = platform.names("decode")
    lines: list[str] = []
    old_pid = None
    async with http.stream(
        "POST", platform.url + "/v1/completions", json=body(random_prompt(500, 1), 4000, stream=True)
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                lines.append(line.removeprefix("data: "))
            if len(lines) == 20:
                old_pid = platform.kill(victim)
    assert old_pid is not None
    assert lines[-1] == "[DONE]"
    error = json.loads(lines[-2])["error"]
    assert error["message"] and "type" in error
    platform.wait_restarted(victim, old_pid)
    wait_for(
        "the gateway to know the new worker",
        lambda: httpx.get(platform.url + "/ready", timeout=2).status_code == 200,
        30,
    )
    await check_answers(platform, plain, http, range(4000, 4003))
    assert_clean(platform)


@pytest.mark.parametrize("role", ["store-node", "store-master", "conductor"])
async def test_killed_beside_the_path(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient, role: str) -> None:
    name = platform.names(role)[0]
    prompts = [random_prompt(2000, seed=5000 + len(role) * 10 + i) for i in range(4)]
    expected = [await complete(http, plain.url, p) for p in prompts]
    calls = [asyncio.create_task(complete(http, platform.url, p)) for p in prompts]
    await asyncio.sleep(0.2)
    old_pid = platform.kill(name)
    got = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert [g.token_ids for g in got] == [e.token_ids for e in expected]
    await check_answers(platform, plain, http, range(5100, 5104))
    platform.wait_restarted(name, old_pid, 60)
    await check_answers(platform, plain, http, range(5200, 5204))
    again = await asyncio.gather(*(complete(http, platform.url, p) for p in prompts))
    assert [g.token_ids for g in again] == [e.token_ids for e in expected]


async def test_etcd_down_for_a_minute(platform: Platform, plain: PlainVLLM, http: httpx.AsyncClient) -> None:
    """The supervisor would restart etcd at once; holding it stopped (SIGSTOP) for 60 s and killing it then is the longer outage."""
    import os
    import signal

    pid = platform.role("etcd").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        end, seed = time.monotonic() + 60, 6000
        while time.monotonic() < end:
            await check_answers(platform, plain, http, range(seed, seed + 1))
            seed += 1
            await asyncio.sleep(2)
    finally:
        os.kill(pid, signal.SIGKILL)
    platform.wait_restarted("etcd", pid, 60)
    await check_answers(platform, plain, http, range(6500, 6503))
    wait_for("all ready", lambda: httpx.get(platform.url + "/ready", timeout=2).status_code == 200, 30)
