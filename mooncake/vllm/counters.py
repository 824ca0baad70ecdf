"""Counters and gauges of one connector half, by Prometheus sample name with labels, and what each name means.

Knows: names, help texts, absolute values; thread-safe. Does not know: Prometheus (the worker host renders them).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

PREFIX = "mooncake_connector_"
_MAX_SAMPLES = 1000


class Metric(NamedTuple):
    kind: Literal["counter", "gauge"]
    help: str


METRICS: dict[str, Metric] = {
    "errors_total": Metric("counter", "Background work that raised something unexpected (the log has it)"),
    "held_transfers": Metric("gauge", "Transfers whose prompt blocks a prefill leg keeps for its consumers"),
    "host_link_dropped_total": Metric("counter", "Messages to the worker host dropped because it did not read them"),
    "layers_sent_bytes_total": Metric("counter", "Bytes written into other engines' blocks"),
    "loads_total": Metric("counter", "Loads of KVCache into this engine by where from and how they ended"),
    "malformed_legs_total": Metric("counter", "Requests whose kv_transfer_params could not be read and were ignored"),
    "pending_saves": Metric("gauge", "Store blocks that wait to be saved or are being saved"),
    "quarantined_blocks": Metric("gauge", "Blocks kept because a peer may still write into them"),
    "recomputed_tokens_total": Metric("counter", "Prompt tokens computed again because their KVCache did not arrive"),
    "store_dropped_saves_total": Metric("counter", "Store blocks that were not saved"),
    "store_load_seconds_total": Metric("counter", "Time in loads from the store"),
    "store_loaded_bytes_total": Metric("counter", "Bytes loaded from the store"),
    "store_lookups_total": Metric("counter", "Look-ups of a prompt's prefix in the store by what came of them"),
    "store_saved_blocks_total": Metric("counter", "Store blocks saved, those that were there already included"),
    "transfers_total": Metric("counter", "Streams to consumers by how they ended"),
    "unreachable_consumers_total": Metric("counter", "Consumers that reserved blocks and could not be reached"),
    "unreadable_messages_total": Metric("counter", "Messages of peers that could not be read"),
    "waiting_loads": Metric("gauge", "Requests whose KVCache is on its way from a prefill instance"),
}
"""All that the connector counts, by name without prefix, sorted. What a half tells beyond it has no help text, and a test fails."""


def sample(name: str, **labels: str) -> str:
    """`mooncake_connector_<name>{a="b"}`; label values are our own short words and need no escaping."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{PREFIX}{name}{{{inner}}}" if inner else f"{PREFIX}{name}"


class CounterSet:
    """Bounded: samples beyond the bound are not kept."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._source: Callable[[], Mapping[str, float]] = dict
        self._read: Mapping[str, float] = {}
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

    def read_from(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Tell also what `source` says at each `take_changes`, by whole sample name: what others count (the transfer engine)."""
        self._source = source

    def take_changes(self) -> dict[str, float] | None:
        """All values when anything changed since the last call, else None."""
        read = dict(itertools.islice(self._source().items(), _MAX_SAMPLES))
        with self._lock:
            if not self._changed and read == self._read:
                return None
            self._changed, self._read = False, read
            return self._values | read
