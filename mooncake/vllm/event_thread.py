"""A thread that feeds one handler with events in order, and with ticks when there are none.

Knows: queueing and the outermost try. Does not know: the events. What a handler raises is logged and counted, and the thread
goes on: one broken event must not stop all others.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")
_log = logging.getLogger(__name__)


class EventThread(Generic[E]):
    """`handle(event)` runs on the thread for everything posted; `handle(None)` is a tick, at least every `tick_s`."""

    def __init__(
        self, name: str, handle: Callable[[E | None], None], *, tick_s: float, on_error: Callable[[], None]
    ) -> None:
        self._queue: queue.SimpleQueue[E | None] = queue.SimpleQueue()
        self._handle, self._tick_s, self._on_error = handle, tick_s, on_error
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, event: E) -> None:
        """Queues an event; callable from any thread, never waits."""
        self._queue.put(event)

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._closing = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._closing:
            try:
                event = self._queue.get(timeout=self._tick_s)
            except queue.Empty:
                event = None
            try:
                self._handle(event)
            except Exception:
                self._on_error()
                _log.exception("an event could not be handled")
