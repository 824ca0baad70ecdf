"""Keeps a set of processes: starts them stage by stage, starts again what dies, stops all in order.

Knows: stages, exponential back-off, the watchdog. Does not know: what the processes are (local.py) or how it looks
(terminal.py). A process that cannot start at first is an error and ends everything; one that was ready once is started
again for ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from deploy.child import Child, ChildSpec, StartFailed, describe_exit
from deploy.processes import adopted, become_subreaper, end, kill, reap_adopted
from deploy.watchdog import Watchdog

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MAX_S = 30.0
_HEALTHY_AFTER_S = 60.0
_REAP_EVERY_S = 5.0


class Supervisor:
    """`stages` start one after another, the members of a stage together; `stop_order` is the order of roles at the end."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        *,
        stop_order: Sequence[frozenset[str]] = (),
        say: Callable[[str], None] = print,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self.children = {child.spec.name: child for stage in self._stages for child in stage}
        self._stop_order = stop_order
        self._say = say
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        become_subreaper()
        self._watchdog = Watchdog()

    @property
    def own_pid(self) -> int:
        """The process that `mooncake up` is."""
        return os.getpid()

    async def start(self) -> None:
        """Returns when every process is ready. Raises StartFailed of the first that cannot start (then call `stop`)."""
        self._tasks.append(asyncio.create_task(self._reap(), name="reap"))
        for stage in self._stages:
            first = [asyncio.create_task(self._first_start(child)) for child in stage]
            try:
                await asyncio.gather(*first)
            finally:
                for task in first:
                    task.cancel()
                await asyncio.gather(*first, return_exceptions=True)

    async def _first_start(self, child: Child) -> None:
        await self._spawn(child)
        await child.wait_ready()
        self._on_change()
        self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep {child.spec.name}"))

    async def _spawn(self, child: Child) -> None:
        await child.start()
        self._guard()
        self._on_change()

    def _guard(self) -> None:
        self._watchdog.guard(c.pid for c in self.children.values() if c.pid)

    async def _keep(self, child: Child) -> None:
        """Waits for the end of a process that was ready, and starts it again, for ever."""
        backoff_s = _BACKOFF_FIRST_S
        while True:
            ready_at = time.monotonic()
            status = await child.wait_end()
            if self._stopping:
                return
            await self._clean_after(child)
            if time.monotonic() - ready_at > _HEALTHY_AFTER_S:
                backoff_s = _BACKOFF_FIRST_S
            reason = describe_exit(status)
            while True:
                child.enter("ended")
                self._on_change()
                self._say(f"{child.spec.name} {reason}; starting it again in {backoff_s:g} s (log: {child.spec.log})")
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
                child.restarts += 1
                await self._spawn(child)
                try:
                    await child.wait_ready()
                    break
                except StartFailed as error:
                    reason = str(error).splitlines()[0].removeprefix(child.spec.name + " ").partition(";")[0]
                    await child.stop()
                    await self._clean_after(child)
            self._say(f"{child.spec.name} is ready again")
            self._on_change()

    async def _clean_after(self, child: Child) -> None:
        """What the dead process started must not go on: its group, and orphans that left the group."""
        self._guard()
        pids = {c.pid for c in self.children.values() if c.pid}
        pids.add(self._watchdog.pid)
        await end(child.relatives() | adopted(pids, pids), child.spec.family_grace_s)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            reap_adopted({c.pid for c in self.children.values() if c.pid} | {self._watchdog.pid})

    async def stop(self, *, at_once: bool = False) -> None:
        """Stops everything in order; each process has its own grace, `at_once` none. Nothing is left when it
        returns.
        """
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        rank = {role: i for i, roles in enumerate(self._stop_order) for role in roles}
        by_rank: dict[int, list[Child]] = {}
        for child in self.children.values():
            by_rank.setdefault(rank.get(child.spec.role, len(self._stop_order)), []).append(child)
        for _, group in sorted(by_rank.items()):
            await asyncio.gather(*(child.stop(0.0 if at_once else None) for child in group))
            self._on_change()
        kill(adopted({self._watchdog.pid}, {self._watchdog.pid}))
        self._watchdog.close()
