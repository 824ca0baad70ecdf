"""From a configuration to a vLLM that serves: what it is told about the cluster, and the wait until it is up.

Knows: the registry's store master, which may change later, the health check, the connector's hellos. Does not know: what
becomes of the worker afterwards (host.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from mooncake.common.errors import MooncakeError
from mooncake.common.registry import Registry
from mooncake.vllm.engine_process import EngineFailed, EngineProcess
from mooncake.vllm.host_link import SchedulerHello, WorkerHello
from mooncake.vllm.host_link_server import HostLinkServer

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 30.0
_ASK_EVERY_S = 0.25


class StartStopped(Exception):
    """SIGTERM came before the engine was up."""


async def follow_store_masters(registry: Registry, tell: Callable[[Sequence[str]], Awaitable[None]]) -> None:
    """Tells the leading store master, now and at each change, until cancelled. While nobody leads the last one stays: it
    may well come back under its address."""
    changed = asyncio.Event()
    stop_watching = registry.watch_leader("store-master", lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            changed.clear()
            if (leader := registry.leader("store-master")) is not None:
                await tell((leader.address,))
    finally:
        stop_watching()


class StartWatch:
    """Waits for one engine. `exited` fails when the engine ends, `stop` is set at SIGTERM."""

    def __init__(
        self,
        engine: EngineProcess,
        exited: asyncio.Task[Any],
        stop: asyncio.Event,
        *,
        check: Callable[[], Awaitable[object]],
        link: HostLinkServer,
    ) -> None:
        self._engine = engine
        self._exited = exited
        self._stop = stop
        self._check = check
        self._link = link

    async def until_up(self, deadline_s: float) -> tuple[WorkerHello, SchedulerHello]:
        """Healthy, and both halves of the connector said hello. Raises EngineFailed, StartStopped."""
        begun_s = time.monotonic()
        await self._first(self._healthy(), deadline_s, "answer /health")
        _log.info("vLLM is healthy", extra={"fields": {"after_s": round(time.monotonic() - begun_s, 1)}})
        hellos: tuple[WorkerHello, SchedulerHello] = await self._first(
            self._hellos(), _HELLO_TIMEOUT_S, "load the Mooncake connector"
        )
        return hellos

    async def _healthy(self) -> None:
        while True:
            try:
                await self._check()
                return
            except MooncakeError:
                await asyncio.sleep(_ASK_EVERY_S)

    async def _hellos(self) -> tuple[WorkerHello, SchedulerHello]:
        return await asyncio.shield(self._link.worker_hello), await asyncio.shield(self._link.scheduler_hello)

    async def _first(self, work: Coroutine[Any, Any, Any], timeout_s: float, what: str) -> Any:
        """`work`, unless the engine ends, SIGTERM comes, or time is up first."""
        task = asyncio.create_task(work, name=f"engine start: {what}")
        stop = asyncio.create_task(self._stop.wait(), name="engine start: stop")
        try:
            await asyncio.wait({task, self._exited, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if stop.done():
                raise StartStopped
            if self._exited.done():
                self._exited.result()
            raise EngineFailed(f"vLLM did not {what} within {timeout_s:g} s. Its last lines:\n{self._engine.tail()}")
        finally:
            task.cancel()
            stop.cancel()
