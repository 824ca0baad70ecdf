"""The worker host's own metrics that are read from its parts when asked for.

Knows: names and texts. Does not know: how the parts count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from mooncake.vllm.host import WorkerHost

_PREFIX = "mooncake_worker_"
_HELD_COUNTERS = (
    ("kv_events_ignored", "ignored_events", "KV events of other media, groups or shapes"),
    ("kv_blocks_stored", "stored_blocks", "Blocks that KV events told as stored"),
    ("kv_parents_unknown", "unknown_parents", "Stored events without known parent"),
    ("kv_removals_unknown", "unknown_removals", "Removed blocks that were not known"),
    ("kv_overflows", "overflows", "Times that more blocks were told than there are"),
)


class HostCollector(Collector):
    """Reads one host."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def collect(self) -> Iterable[Metric]:
        host, events, held = self._host, self._host.events, self._host.held
        attached = bool(host.conductor and host.conductor.attached)
        yield _gauge("ready", "1 while the worker serves", host.ready)
        yield _gauge("conductor_attached", "1 while the stream to the Conductor stands", attached)
        yield _gauge("held_block_keys", "Block keys in the engine's prefix cache", len(held) if held else 0)
        yield _counter("kv_event_batches", "Batches of KV events applied", events.batches)
        yield _counter("kv_event_batches_lost", "Batches of KV events that never came", events.lost_batches)
        yield _counter("kv_event_batches_bad", "Batches of KV events that were unreadable", events.bad_batches)
        yield _counter("host_link_dropped", "Host link messages dropped", host.link.dropped)
        for name, attribute, text in _HELD_COUNTERS:
            yield _counter(name, text, getattr(held, attribute) if held is not None else 0)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=float(value))


def register(registry: CollectorRegistry, host: WorkerHost) -> None:
    """Adds the host's metrics to its registry."""
    registry.register(HostCollector(host))
