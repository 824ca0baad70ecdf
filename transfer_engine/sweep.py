"""The engine's clock: ends what is overdue.

Knows: one thread that sleeps until the earliest deadline. Does not know: what is overdue (it calls). Workers blocked on a
frozen peer cannot end the jobs queued behind them; this thread can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from transfer_engine import threads


class Sweeper:
    """`sweep(now)` ends what is overdue and returns the next deadline, or None when nothing waits."""

    def __init__(self, name: str, sweep: Callable[[float], float | None]) -> None:
        self._sweep = sweep
        self._lock = threading.Lock()  # this one is entered, not the condition: threads.py
        self._changed = threading.Condition(self._lock)
        self._next: float | None = None
        self._closed = False
        self._thread = threads.start(name, self._run)

    def expect(self, deadline: float) -> None:
        """A new deadline exists."""
        if self._next is not None and self._next <= deadline:
            return
        with self._lock:
            if self._next is None or deadline < self._next:
                self._next = deadline
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                if self._next is None:
                    self._changed.wait()
                elif (left := self._next - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._closed:
                    return
                now = time.monotonic()
                if self._next is None or self._next > now:
                    continue
                self._next = now + 3600.0  # a deadline that comes in meanwhile lowers it
            following = self._sweep(now)
            with self._lock:
                expected = self._next if self._next < now + 3600.0 else None
                candidates = [when for when in (following, expected) if when is not None]
                self._next = min(candidates) if candidates else None

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
