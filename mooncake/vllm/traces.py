"""Trace events of transfers, collected while they live and handed over when they end.

Knows: bounds; unix times. Does not know: where traces are shown (docs/protocol.md §4).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mooncake.vllm.host_link import TraceEvents

_MAX_TRANSFERS = 1024
_MAX_EVENTS = 4096


class TraceBook:
    """`sink` gets one `TraceEvents` a transfer."""

    def __init__(self, sink: Callable[[TraceEvents], None]) -> None:
        self._sink = sink
        self._open: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def add(self, transfer_id: str, event: str, at_s: float | None = None, **fields: Any) -> None:
        """Records an event of a transfer, now unless told when."""
        record = {"t": time.time() if at_s is None else at_s, "event": event, **fields}
        with self._lock:
            events = self._open.get(transfer_id)
            if events is None:
                if len(self._open) >= _MAX_TRANSFERS:
                    return
                events = self._open[transfer_id] = []
            if len(events) < _MAX_EVENTS:
                events.append(record)

    def finish(self, transfer_id: str) -> None:
        """Sends what was collected."""
        with self._lock:
            events = self._open.pop(transfer_id, None)
        if events:
            events.sort(key=lambda event: event["t"])
            self._sink(TraceEvents(transfer_id=transfer_id, events=events))
