"""Makes vLLM's processes wait for each other in `poll` instead of spinning.

vLLM's shared-memory queue spins on `sched_yield` for a second after every message (shm_broadcast.py, `SpinCondition`): an
engine that waits for KV, or serves one slow stream, burns a core in each of its processes and takes it from the transfer
threads and from the other engines of a CPU machine. Shortening the spin to a fraction of a millisecond keeps the latency
of busy steps. Only for CPU platforms: on a GPU the spin is the right trade.
Knows: that one class. Leaves everything alone when it looks different from what is known.
"""

from __future__ import annotations

import logging
import time
from typing import Any

_log = logging.getLogger(__name__)
SPIN_S = 0.0005
_RECHECK_MS = 20
"""While traffic is recent, a lost notification costs no more than this."""


def quiet_message_queues() -> bool:
    """Patches the class once per process; True when it is in force."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return False
    original: Any = SpinCondition.wait
    if getattr(original, "_mooncake", False):
        return True
    if "busy_loop_s" not in SpinCondition.__init__.__code__.co_varnames:
        _log.warning("vLLM's SpinCondition has changed: its queues keep spinning")
        return False

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = min(self.busy_loop_s, SPIN_S)
        if time.monotonic() - self.last_read < 1.0:
            timeout_ms = _RECHECK_MS if timeout_ms is None else min(timeout_ms, _RECHECK_MS)
        original(self, timeout_ms)

    wait._mooncake = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
    return True
