"""Circuit breaker: after some failures in a row, no more tries for a while, then one at a time. Pure: `now` comes in.

Knows: outcomes. Does not know: what is tried. DESIGN.md section 4: the inference path never depends on the store.
"""

from __future__ import annotations

import threading


class Breaker:
    """Thread-safe. Every `allow` that said True is answered by `success` or `failure`; one that never is counts as
    failed after `open_s`."""

    def __init__(self, *, failures: int = 3, open_s: float = 3.0) -> None:
        self._limit = failures
        self._open_s = open_s
        self._lock = threading.Lock()
        self._failures = 0
        self._rests_until_s: float | None = None  # no try before; None: everybody may try

    def allow(self, now: float) -> bool:
        """False: do not even try. While half open, one caller may."""
        with self._lock:
            if self._rests_until_s is None:
                return True
            if now < self._rests_until_s:
                return False
            self._rests_until_s = now + self._open_s  # this caller probes; the others wait for it
            return True

    def success(self) -> None:
        with self._lock:
            self._failures = 0
            self._rests_until_s = None

    def failure(self, now: float) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self._limit:
                self._rests_until_s = now + self._open_s

    @property
    def is_open(self) -> bool:
        return self._rests_until_s is not None
