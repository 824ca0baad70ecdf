"""Trace events of transfers, collected while they live and handed over when they end.

Several threads tell what they see, and some see it late: what comes after the end is handed over at once. Knows: bounds; unix times.
Does not know: where traces are shown (docs/protocol.md §4).
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from mooncake.vllm.host_link import TraceEvents

_MAX_TRANSFERS = 1024
_MAX_EVENTS = 4096


class TraceBook:
    """`sink` takes `TraceEvents`, usually one a transfer."""

    def __init__(self, sink: Callable[[TraceEvents], None]) -> None:
        self._sink = sink
        self._open: collections.OrderedDict[str, list[dict[str, Any]]] = collections.OrderedDict()
        self._ended: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, transfer_id: str, event: str, at_s: float | None = None, **fields: Any) -> None:
        """Records an event of a transfer, now unless told when."""
        record = {"t": time.time() if at_s is None else at_s, "event": event, **fields}
        with self._lock:
            late = transfer_id in self._ended
            if not late:
                self._keep(transfer_id, record)
        if late:
            self._sink(TraceEvents(transfer_id=transfer_id, events=[record]))

    def _keep(self, transfer_id: str, record: dict[str, Any]) -> None:
        events = self._open.setdefault(transfer_id, [])
        if len(events) < _MAX_EVENTS:
            events.append(record)
        while len(self._open) > _MAX_TRANSFERS:
            self._open.popitem(last=False)

    def finish(self, transfer_id: str) -> None:
        """Hands over what was collected."""
        with self._lock:
            events = self._open.pop(transfer_id, None)
            self._ended[transfer_id] = None
            while len(self._ended) > _MAX_TRANSFERS:
                self._ended.popitem(last=False)
        if events:
            events.sort(key=lambda event: event["t"])
            self._sink(TraceEvents(transfer_id=transfer_id, events=events))
