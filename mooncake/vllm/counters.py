"""Counters and gauges of one connector half, by Prometheus sample name with labels, and where they are sent.

Knows: absolute values; thread-safe. Does not know: Prometheus (the worker host renders them).
"""

from __future__ import annotations

import threading

PREFIX = "mooncake_connector_"
_MAX_SAMPLES = 1000


def sample(name: str, **labels: str) -> str:
    """`mooncake_connector_<name>{a="b"}`; label values are our own short words and need no escaping."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{PREFIX}{name}{{{inner}}}" if inner else f"{PREFIX}{name}"


class CounterSet:
    """Bounded: samples beyond the bound are not kept."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._changed = False
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        key = sample(name, **labels)
        with self._lock:
            if key in self._values or len(self._values) < _MAX_SAMPLES:
                self._values[key] = self._values.get(key, 0) + amount
                self._changed = True

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        key = sample(name, **labels)
        with self._lock:
            if self._values.get(key) != value and (key in self._values or len(self._values) < _MAX_SAMPLES):
                self._values[key] = value
                self._changed = True

    def get(self, name: str, **labels: str) -> float:
        """Present value, 0 when never set."""
        with self._lock:
            return self._values.get(sample(name, **labels), 0)

    def take_changes(self) -> dict[str, float] | None:
        """All values when anything changed since the last call, else None."""
        with self._lock:
            if not self._changed:
                return None
            self._changed = False
            return dict(self._values)
