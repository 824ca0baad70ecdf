"""Is vLLM alive and working? Health checks, and a one-token request when it has been silent for long.

vLLM's `/health` answers from the API server as long as the engine's process exists; only a request tells whether the
engine core still steps. Knows: when to call it hung. Does not know: what is done then (host.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from mooncake.common.errors import MooncakeError
from mooncake.vllm.engine_process import EngineFailed

_log = logging.getLogger(__name__)
_FAILURES_UNTIL_UNWELL = 2


class EngineHealth:
    """`check` and `probe` raise MooncakeError when they fail; `steps` grows while the engine works."""

    def __init__(
        self,
        *,
        check: Callable[[], Awaitable[object]],
        probe: Callable[[], Awaitable[object]],
        steps: Callable[[], int],
        every_s: float,
        hang_after_s: float,
    ) -> None:
        self.well = True
        """False after two failed checks in a row, and true again after a good one."""
        self._check = check
        self._probe = probe
        self._steps = steps
        self._every_s = every_s
        self._hang_after_s = hang_after_s

    async def run(self) -> None:
        """Checks until cancelled. Raises EngineFailed when the engine hangs."""
        good_s = progress_s = time.monotonic()
        seen = self._steps()
        failures = 0
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._check()
                good_s, failures = time.monotonic(), 0
            except MooncakeError as error:
                failures += 1
                _log.warning("health check failed", extra={"fields": {"error": str(error), "in_a_row": failures}})
            self.well = failures < _FAILURES_UNTIL_UNWELL
            if time.monotonic() - good_s > self._hang_after_s:
                raise EngineFailed(f"vLLM has not answered a health check for {self._hang_after_s:g} s")
            if self._steps() != seen:
                seen, progress_s = self._steps(), time.monotonic()
            elif self.well and time.monotonic() - progress_s > self._hang_after_s:
                await self._prove()
                progress_s = time.monotonic()

    async def _prove(self) -> None:
        before = self._steps()
        try:
            await asyncio.wait_for(self._probe(), self._hang_after_s)
        except (TimeoutError, MooncakeError) as error:
            if self._steps() == before:
                self.well = False
                raise EngineFailed(f"vLLM's engine does not step: a one-token request failed: {error!r}") from error
