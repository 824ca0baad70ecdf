"""What a store master tells Prometheus. Names and meaning: docs/store.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from store.master.core import MasterCore

PREFIX = "mooncake_store_master_"
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class MasterMetrics(Collector):
    """Counters of calls, and the core's numbers at the moment of the scrape."""

    def __init__(self, registry: CollectorRegistry, core: Callable[[], MasterCore | None]) -> None:
        self._core = core
        self.requests = Counter(PREFIX + "requests", "Calls", ["call"], registry=registry)
        self.failures = Counter(PREFIX + "failures", "Calls that ended in an error", ["call"], registry=registry)
        self.seconds = Histogram(
            PREFIX + "call_seconds", "Time in a call", ["call"], buckets=_SECONDS, registry=registry
        )
        self.put_codes = Counter(PREFIX + "put_slots", "Keys of PutStart by answer", ["code"], registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        core = self._core()
        yield _gauge("leading", "1 while this master leads", float(core is not None))
        if core is None:
            return
        status = core.status(time.monotonic())
        yield _gauge("epoch", "Epoch of this master's leadership", core.epoch)
        yield _gauge("objects", "Readable objects", status.objects)
        yield _gauge("leases", "Read leases that are out", status.leases)
        yield _gauge("puts", "Unfinished puts", status.puts)
        yield _gauge("segments", "Mounted segments", len(status.segments))
        for name, text, values in (
            ("segment_capacity_bytes", "Size of a segment", [s.capacity_bytes for s in status.segments]),
            ("segment_allocated_bytes", "Memory in use", [s.allocated_bytes for s in status.segments]),
            ("segment_objects", "Replicas on a segment", [s.objects for s in status.segments]),
            ("segment_heartbeat_age_seconds", "When it was last heard", [s.heartbeat_age_s for s in status.segments]),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=["segment"])
            for segment, value in zip(status.segments, values, strict=True):
                family.add_metric([segment.name], value)
            yield family
        counters = core.counters
        for name, text, number in (
            ("evictions", "Objects evicted", core.pool.evictions),
            ("evicted_bytes", "Memory that evictions freed", core.pool.evicted_bytes),
            ("get_hits", "Keys that GetStart found", counters.hits),
            ("get_misses", "Keys that GetStart did not find", counters.misses),
            ("alloc_failures", "Keys of PutStart for which there was no room", counters.alloc_failures),
            ("expired_leases", "Read leases that no reader gave back", counters.expired_leases),
            ("expired_puts", "Puts that no writer ended", counters.expired_puts),
            ("adopted_objects", "Objects learnt from nodes' reports", counters.adopted_objects),
            ("refused_reports", "Lines of nodes' reports that made no sense", counters.refused_reports),
            ("suspects", "Nodes that a client found dead", counters.suspects),
            ("dropped_segments", "Nodes that fell silent", counters.dropped_segments),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=number)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
