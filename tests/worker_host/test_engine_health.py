"""When an engine counts as unwell, and when as hung."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mooncake.common.errors import MooncakeError
from mooncake.vllm.engine_health import EngineHealth
from mooncake.vllm.engine_process import EngineFailed


class StandIn:
    """An engine whose answers can be switched off."""

    def __init__(self) -> None:
        self.healthy = True
        self.working = True
        self.steps = 0
        self.checks = 0
        self.probes = 0

    async def check(self) -> None:
        self.checks += 1
        if not self.healthy:
            raise MooncakeError("no answer")

    async def probe(self) -> None:
        self.probes += 1
        if not self.working:
            await asyncio.sleep(3600)
        self.steps += 1

    def health(self, hang_after_s: float) -> EngineHealth:
        return EngineHealth(
            check=self.check, probe=self.probe, steps=lambda: self.steps, every_s=0.01, hang_after_s=hang_after_s
        )


async def while_running(health: EngineHealth, body: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(health.run())
    try:
        async with asyncio.timeout(5):
            await body()
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_unwell_after_two_failures_and_well_again() -> None:
    engine = StandIn()
    health = engine.health(60)

    async def body() -> None:
        engine.healthy = False
        while health.well:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert engine.checks >= 2
        engine.healthy = True
        while not health.well:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await while_running(health, body)


async def test_no_answer_for_long_is_a_failure() -> None:
    engine = StandIn()
    engine.healthy = False
    with pytest.raises(EngineFailed, match="health check"):
        await asyncio.wait_for(engine.health(0.1).run(), 5)


async def test_an_engine_that_answers_but_does_not_step_is_hung() -> None:
    engine = StandIn()
    engine.working = False
    with pytest.raises(EngineFailed, match="does not step"):
        await asyncio.wait_for(engine.health(0.1).run(), 5)


async def test_an_idle_engine_is_asked_now_and_then_and_a_busy_one_never() -> None:
    engine = StandIn()

    async def body() -> None:
        while engine.probes < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await while_running(engine.health(0.05), body)
    busy = StandIn()

    async def work() -> None:
        for _ in range(40):
            busy.steps += 1
            await asyncio.sleep(0.01)

    await while_running(busy.health(0.3), work)
    assert busy.probes == 0
