"""The transport's one lock, and the calls that must wait until it is free.

Knows: that effects of a submission's end (callbacks, notifications, other transports) may come back to us, so they run after
the lock was given back. Python's calls into verbs hold the GIL anyway: more locks would buy nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Guard:
    """`with guard:` takes the lock; `later` puts a call off until the block has ended. Not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        calls, self._calls = self._calls, []
        self._lock.release()
        for call in calls:
            call()

    def later(self, call: Callable[[], None]) -> None:
        """Within the block only."""
        self._calls.append(call)
