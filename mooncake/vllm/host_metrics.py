"""The worker host's own metrics that are read from its parts when asked for.

Knows: names and texts. Does not know: how the parts count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Reader = Callable[[], float]


class PartsCollector:
    """Gauges and counters (names without `_total`) as (name, text, reader)."""

    def __init__(self, gauges: Iterable[tuple[str, str, Reader]], counters: Iterable[tuple[str, str, Reader]]) -> None:
        self._gauges = list(gauges)
        self._counters = list(counters)

    def collect(self) -> Iterable[Metric]:
        for name, text, read in self._gauges:
            yield GaugeMetricFamily(name, text, value=read())
        for name, text, read in self._counters:
            yield CounterMetricFamily(name, text, value=read())


def register(
    registry: CollectorRegistry,
    *,
    gauges: Iterable[tuple[str, str, Reader]],
    counters: Iterable[tuple[str, str, Reader]],
) -> None:
    """Adds them to the registry under `mooncake_worker_…`."""

    def named(parts: Iterable[tuple[str, str, Reader]]) -> list[tuple[str, str, Reader]]:
        return [(f"mooncake_worker_{name}", text, read) for name, text, read in parts]

    registry.register(PartsCollector(named(gauges), named(counters)))
