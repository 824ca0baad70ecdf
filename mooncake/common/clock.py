"""Clocks as values, so that cores and shells run in real or in virtual time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; the zero is arbitrary."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told. Raises ValueError when told to go back."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        if at_s < self._now_s:
            raise ValueError(f"virtual time cannot go back from {self._now_s} to {at_s}")
        self._now_s = at_s
