"""The tokenizer pool with real processes: deaths, hangs, bounds, and an event loop that never waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from mooncake.common.block_key import block_keys, pack_keys, root_key
from mooncake.common.errors import BadRequest, Overloaded
from mooncake.gateway.conversation import NoKVInformation
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.render import RenderJob
from mooncake.gateway.tokenizer_pool import TokenizerPool
from mooncake.models import resolve_model
from tests.gateway.conftest import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model_dir() -> str:
    return str(resolve_model("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model_dir: str) -> AsyncIterator[TokenizerPool]:
    made = TokenizerPool(GatewayMetrics(CollectorRegistry()), processes=2, max_waiting=50, timeout_s=5)
    await made.load(model_dir)
    yield made
    made.close()


def chat(model_dir: str, *, limit: int = 8192, **body: Any) -> RenderJob:
    asked = {"messages": [{"role": "user", "content": "hi"}]} | body
    return RenderJob(model_dir, "tiny", "fp", 32, limit, True, asked, trust_chat_template=True)


def text(model_dir: str, prompt: str | list[int], limit: int = 8192) -> RenderJob:
    return RenderJob(model_dir, "tiny", "fp", 32, limit, False, {}, prompt, cache_salt="s")


async def test_keys_are_those_of_the_ids(pool: TokenizerPool, model_dir: str) -> None:
    ids = list(range(100, 400))
    rendered = await pool.render(text(model_dir, ids))
    root = root_key(model="tiny", fingerprint="fp", block_size=32, cache_salt="s")
    assert rendered.block_keys == pack_keys(block_keys(root, ids, 32))
    assert len(rendered.block_keys) == 16 * 9


@pytest.mark.parametrize("prompt", ["word " * 200_000, list(range(5000)), "a b " * 5000])
async def test_too_long(pool: TokenizerPool, model_dir: str, prompt: str | list[int]) -> None:
    with pytest.raises(BadRequest) as caught:
        await pool.render(text(model_dir, prompt, 4096))
    assert caught.value.error_code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"chat_template": "{{ raise_exception('no') }}"},
        {"chat_template": "{% if %}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": "x"},
        {"tools": [{"type": "web"}]},
        {"tools": []},
        {"add_generation_prompt": "yes"},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        {"truncate_prompt_tokens": 5},
    ],
    ids=str,
)
async def test_what_it_does_not_know(pool: TokenizerPool, model_dir: str, body: dict[str, Any]) -> None:
    with pytest.raises(NoKVInformation):
        await pool.render(chat(model_dir, **body))


async def test_no_such_model(pool: TokenizerPool) -> None:
    with pytest.raises(NoKVInformation):
        await pool.render(chat("/nonexistent/model"))


async def test_own_template_needs_trust(pool: TokenizerPool, model_dir: str) -> None:
    job = chat(model_dir, chat_template="{{ messages[0].content }} x")
    assert (await pool.render(job)).prompt_tokens == 2
    untrusted = RenderJob(*(getattr(job, name) for name in list(job.__dataclass_fields__)[:-1]))
    with pytest.raises(NoKVInformation):
        await pool.render(untrusted)


@pytest.mark.slow
async def test_dead_process_is_replaced(pool: TokenizerPool, model_dir: str) -> None:
    for pid in pool.pids():
        os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*(pool.render(chat(model_dir)) for _ in range(8)))
    assert len({a.digest for a in answers}) == 1


@pytest.mark.slow
async def test_hanging_process_is_replaced(model_dir: str) -> None:
    made = TokenizerPool(GatewayMetrics(CollectorRegistry()), processes=1, timeout_s=0.5)
    try:
        await made.load(model_dir)
        (old,) = made.pids()
        hanging = asyncio.create_task(made.render(chat(model_dir, chat_template=ENDLESS)))
        await asyncio.sleep(0.05)
        behind = [asyncio.create_task(made.render(chat(model_dir))) for _ in range(3)]
        with pytest.raises(NoKVInformation):
            await hanging
        assert {(await job).digest for job in behind} == {(await made.render(chat(model_dir))).digest}
        assert (await made.render(chat(model_dir))).prompt_tokens > 1
        assert old not in made.pids()
    finally:
        made.close()


async def test_queue_is_bounded(pool: TokenizerPool, model_dir: str) -> None:
    results = await asyncio.gather(*(pool.render(text(model_dir, "x")) for _ in range(120)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, Overloaded)]
    assert len(refused) == 70
    assert (await pool.render(text(model_dir, "x"))).prompt_tokens == 1


async def test_a_long_prompt_delays_nobody(pool: TokenizerPool, model_dir: str) -> None:
    """128k tokens, as text and as ids: meanwhile the loop keeps its 5 ms beat and short prompts go through the other process."""
    long = [
        pool.render(text(model_dir, "hello world this is " * 33_000, 300_000)),
        pool.render(text(model_dir, list(range(128_000)), 300_000)),
    ]
    running = asyncio.gather(*long)
    lags, short = [], []
    while not running.done():
        start = time.monotonic()
        await asyncio.sleep(0.005)
        lags.append(time.monotonic() - start - 0.005)
        if len(lags) % 10 == 0:
            short.append(asyncio.create_task(pool.render(text(model_dir, "short"))))
    first, second = await running
    await asyncio.gather(*short)
    assert first.prompt_tokens > 100_000 and second.prompt_tokens == 128_000
    lags.sort()
    assert lags[len(lags) // 2] < 0.01, lags[-5:]
    assert lags[-1] < 0.3, lags[-5:]


@pytest.mark.slow
async def test_processes_end_with_a_killed_gateway(model_dir: str) -> None:
    code = f"""
import asyncio
from prometheus_client import CollectorRegistry
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.tokenizer_pool import TokenizerPool
async def main():
    pool = TokenizerPool(GatewayMetrics(CollectorRegistry()), processes=1)
    await pool.load({model_dir!r})
    print(*pool.pids(), flush=True)
    await asyncio.sleep(60)
if __name__ == "__main__":
    asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().split()[2] == "Z"
        except FileNotFoundError:
            return True

    await eventually("the child to end", gone)
    parent.stdout.close()
