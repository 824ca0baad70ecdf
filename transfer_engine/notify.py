"""Delivery of notifications and callbacks to the application, off the engine's own threads.

Knows: a bounded queue and one thread. Does not know: what the calls do. A full queue refuses, so a sender learns of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from mooncake.common.errors import Overloaded
from transfer_engine import threads

log = logging.getLogger(__name__)


class Dispatcher:
    """Runs calls one after the other, in the order they were put, on one daemon thread started by the first."""

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, call: Callable[[], None]) -> bool:
        """False when full or closed, or when no thread can be had."""
        if self._closed:
            return False
        try:
            if self._thread is None:
                self._start()
            self._queue.put_nowait(call)
        except (queue.Full, Overloaded):
            return False
        return True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threads.start(self._name, self._run)

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            try:
                call()
            except Exception:  # an application's callback: its failure is not ours
                log.exception("%s: a callback failed", self._name)
            if self._closed and self._queue.empty():
                return

    def close(self, timeout_s: float) -> None:
        """Run what is queued, then end; a callback that does not return is left behind."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        thread.join(timeout_s)
