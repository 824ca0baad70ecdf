"""Metrics of the Conductor, `mooncake_conductor_*` (docs/conductor.md lists them).

Counters and gauges are read off the core when scraped, so that the core needs to know nothing of Prometheus; only what
a single number cannot hold (latencies, errors of estimates) is observed as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.core import Conductor
from conductor.instances import Instance
from conductor.messages import Outcome
from mooncake.common.clock import Clock

_PREFIX = "mooncake_conductor_"
_PLACE_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_ERROR_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Telemetry(Collector):
    """Registers itself and its histograms."""

    def __init__(self, registry: CollectorRegistry, core: Conductor, clock: Clock, leads: Callable[[], bool]) -> None:
        self._core, self._clock, self._leads = core, clock, leads
        self.pool_failures: Callable[[], int] = lambda: 0
        self.pool_breaker_open: Callable[[], bool] = lambda: False
        self._place_s = Histogram(
            _PREFIX + "place_seconds",
            "Time in a placement: asking the store, and deciding",
            ["part"],
            buckets=_PLACE_BUCKETS_S,
            registry=registry,
        )
        self._error_s = Histogram(
            _PREFIX + "ttft_estimate_error_seconds",
            "|estimated - real| time to first token",
            buckets=_ERROR_BUCKETS_S,
            registry=registry,
        )
        self._judged = Counter(
            _PREFIX + "ttft_estimates",
            "First tokens by whether they fell within their estimate's error bar",
            ["within_bar"],
            registry=registry,
        )
        registry.register(self)

    def placed(self, pool_s: float, core_s: float) -> None:
        self._place_s.labels("pool").observe(pool_s)
        self._place_s.labels("core").observe(core_s)

    def judged(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._error_s.observe(outcome.error_s)
            self._judged.labels(str(outcome.within_bar).lower()).inc()

    # --- read at each scrape ---

    def describe(self) -> Iterable[Metric]:
        """Nothing: or registration would collect, before the role is complete."""
        return []

    def collect(self) -> Iterator[Metric]:
        totals, fleet = self._core.totals, self._core.fleet
        yield _counter("placements", "Requests that got instances", totals.placed)
        rejections = CounterMetricFamily(_PREFIX + "rejections", "Rejected requests", labels=["reason"])
        for reason, count in sorted(totals.rejected.items()):
            rejections.add_metric([reason], count)
        yield rejections
        yield _counter(
            "degraded", "Placements on a decoding instance alone, for want of a prefill one", totals.degraded
        )
        yield _counter("requests_without_kv", "Placements without block keys: blind to caches", totals.without_kv)
        yield _counter("replacements", "Requests placed again while still placed", totals.replaced)
        yield _counter("legs_failed", "Legs that gateways reported as failed", totals.legs_failed)
        yield _counter("charges_expired", "Placed requests of which nothing was heard any more", totals.expired)
        yield _counter("sequence_gaps", "Gaps in workers' report streams", fleet.sequence_gaps)
        yield _counter("prompt_tokens", "Prompt tokens placed", totals.prompt_tokens)
        yield _counter("prefix_tokens", "Prompt tokens that the chosen prefill instance held", totals.prefix_tokens)
        yield _counter("pool_tokens", "Prompt tokens planned to be loaded from the store", totals.pool_tokens)
        yield _counter("index_dropped_keys", "Block keys not kept for want of room", fleet.dropped_keys)
        yield _counter("pool_lookup_failures", "Store look-ups that failed or came too late", self.pool_failures())
        yield _gauge("pool_breaker_open", "1 while the store is not asked", self.pool_breaker_open())
        yield _gauge("in_flight", "Placed requests that have not ended", self._core.in_flight)
        yield _gauge("index_keys", "Different block keys held by anyone", fleet.index_keys)
        yield _gauge("leader", "1 while this process leads", self._leads())
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        now = self._clock.now()
        columns: list[tuple[str, str, Callable[[Instance], float]]] = [
            ("events_seen", "Block keys told by the worker; 0: its cache cannot be planned with", _events_seen),
            ("held_blocks", "Block keys it holds", lambda each: self._core.fleet.held_blocks(each.instance_id)),
            ("queue_seconds", "Estimated prefill work that waits on it", lambda each: self._core.queue_s(each, now)),
            ("sequences", "Sequences decoding on it or on their way", lambda each: each.sequences),
            ("attached", "1 while its report stream is open", lambda each: each.attached),
            ("suspect", "1 while it is used only as a last resort", lambda each: each.suspect_since_s is not None),
            ("draining", "1 while it takes no new requests", lambda each: each.draining),
        ]
        for name, text, value in columns:
            family = GaugeMetricFamily(f"{_PREFIX}worker_{name}", text, labels=["worker", "model"])
            for each in self._core.fleet:
                family.add_metric([each.name, each.model], float(value(each)))
            yield family


def _events_seen(each: Instance) -> float:
    return each.events_seen


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))
