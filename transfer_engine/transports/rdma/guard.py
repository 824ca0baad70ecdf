"""The transport's one lock, and the calls that must wait until it is free.

Knows: that effects of a submission's end (callbacks, notifications, other transports) may come back to us, so they run after
the lock was given back. Python's calls into verbs hold the GIL anyway: more locks would buy nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Guard:
    """`with guard.lock:` for what is guarded; `later` within it puts a call off, and `run` after it makes such calls. Not reentrant.

    An application's thread may be interrupted anywhere (KeyboardInterrupt). Only a lock of the interpreter itself is given back
    then for sure; calls that such a thread leaves are made by the next one that comes, a NIC's at the latest."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()

    def later(self, call: Callable[[], None]) -> None:
        """Within the lock only."""
        self._calls.append(call)

    def run(self) -> None:
        """Make the calls that were put off. Without the lock."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread took the last one
                return
            call()
