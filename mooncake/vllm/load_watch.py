"""Looks at vLLM's load again and again: twice a second at work, once a second when idle.

Knows: how often. Does not know: what the text means (engine_load.py) or who is told (`on_load`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from mooncake.common.errors import MooncakeError
from mooncake.vllm.engine_load import DecodeInterval, EngineLoad, LoadTracker

_BUSY_S, _IDLE_S = 0.5, 1.0


class LoadWatch:
    """`read` returns vLLM's metrics text or raises MooncakeError."""

    def __init__(self, read: Callable[[], Awaitable[str]]) -> None:
        self.load = EngineLoad()
        self.looks = 0
        self._read = read
        self._stirred = asyncio.Event()

    def stir(self) -> None:
        """Something happened: look again soon."""
        self._stirred.set()

    async def run(self, kv_capacity_tokens: int, on_load: Callable[[EngineLoad, DecodeInterval | None], None]) -> None:
        """Until cancelled. A look that fails is skipped: health is another's business."""
        tracker = LoadTracker(kv_capacity_tokens)
        while True:
            with contextlib.suppress(MooncakeError):
                text = await self._read()
                self.load, decoded = tracker.update(text, time.monotonic())
                self.looks += 1
                on_load(self.load, decoded)
            self._stirred.clear()
            await asyncio.sleep(_BUSY_S)
            if not (self.load.running or self.load.waiting):
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it can lose a cancellation, and the host would never end.
                    async with asyncio.timeout(_IDLE_S - _BUSY_S):
                        await self._stirred.wait()
