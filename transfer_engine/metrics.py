"""An engine's counters as Prometheus metrics: `mooncake_transfer_*`, by transport, NIC and direction.

Knows: which metric each key of `TransferEngine.stats()` becomes, and what it means. Does not know: who counts. The table and
`samples` need no library; `register` imports prometheus_client, which this package otherwise does without.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

PREFIX = "mooncake_transfer_"


class Metric(NamedTuple):
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


_PATH = ("transport", "nic", "op")
METRICS: dict[str, Metric] = {
    "bytes_total": Metric("counter", "Bytes moved by transfers from here; nic is empty but for rdma", _PATH),
    "callbacks_lost_total": Metric("counter", "Done callbacks that were dropped because their queue was full"),
    "connects_total": Metric(
        "counter", "Data connections and queue pairs made for transfers from here", ("transport",)
    ),
    "accepts_total": Metric("counter", "Queue pairs made for peers' transfers to here", ("transport",)),
    "device_errors_total": Metric("counter", "Slices that failed between device and host memory"),
    "errors_total": Metric("counter", "Endpoints that broke or could not be opened", ("transport", "nic")),
    "evictions_total": Metric("counter", "Idle endpoints closed to make room", ("transport",)),
    "failovers_total": Metric("counter", "Slices sent again because their path failed", ("transport",)),
    "live_transfers": Metric("gauge", "Submissions in progress"),
    "open_connections": Metric("gauge", "Connections that peers opened to here"),
    "open_endpoints": Metric("gauge", "Queue pairs, of both directions"),
    "open_links": Metric("gauge", "Control connections, of both directions"),
    "open_sessions": Metric("gauge", "Peers that transfers from here may go to"),
    "open_streams": Metric("gauge", "TCP data connections to peers"),
    "port_changes_total": Metric("counter", "Times a NIC's port lost its link or got it back", ("nic", "state")),
    "protocol_violations_total": Metric("counter", "Data connections ended because their bytes made no sense"),
    "queued_slices": Metric("gauge", "Slices that wait for a worker or a NIC", ("transport",)),
    "refused_connections_total": Metric(
        "counter", "Connections refused: too many, a wrong token, a broken handshake", ("reason",)
    ),
    "regions": Metric("gauge", "Registered memory regions"),
    "requests_total": Metric("counter", "Requests of the submissions that ended"),
    "reroutes_total": Metric("counter", "Jobs handed to another transport because no path worked", ("transport",)),
    "retries_total": Metric("counter", "Slices sent again, failovers included", ("transport",)),
    "served_bytes_total": Metric("counter", "Bytes that peers' tcp transfers wrote here or read from here", ("op",)),
    "slice_seconds_total": Metric(
        "counter", "Time from sending a slice to its end, summed: divide by slices for the mean latency", _PATH
    ),
    "slices_total": Metric("counter", "Slices moved by transfers from here", _PATH),
    "staging_buffers": Metric("gauge", "Pinned buffers for device memory that no NIC reaches"),
    "staging_waits_total": Metric("counter", "Times that a copy waited for a pinned buffer"),
    "transfers_total": Metric("counter", "Submissions by how they ended", ("state",)),
    "unrevoked_closes_total": Metric("counter", "Engines closed before every peer had let go of their memory"),
}
"""By name without prefix. Every key of `stats()` has its place here; a test fails for one that has not."""

_PLAIN = {
    "device_errors": "device_errors_total",
    "lost_callbacks": "callbacks_lost_total",
    "transfer_requests": "requests_total",
    "protocol_violations": "protocol_violations_total",
    "staging_waits": "staging_waits_total",
    "unrevoked_closes": "unrevoked_closes_total",
}
_REFUSED = {
    "refused_connections": "limit",
    "authentication_failures": "authentication",
    "failed_handshakes": "handshake",
}
_EVENTS = {
    "dials": "connects_total",
    "connects": "connects_total",
    "accepts": "accepts_total",
    "evictions": "evictions_total",
    "retries": "retries_total",
    "failovers": "failovers_total",
    "reroutes": "reroutes_total",
    "queued_slices": "queued_slices",
}
_MOVED = {"bytes": "bytes_total", "slices": "slices_total", "seconds": "slice_seconds_total"}
_SERVED = re.compile(r"served_(read|write)_bytes")
_NIC_MOVED = re.compile(r"rdma_(.+)_(read|write)_(bytes|slices|seconds)")
_NIC_ERRORS = re.compile(r"rdma_(.+)_errors")
_NIC_PORT = re.compile(r"rdma_(.+)_port_(up|down)")
_MOVED_BY = re.compile(r"([a-z]+)_(read|write)_(bytes|slices|seconds)")
_EVENT = re.compile(r"([a-z]+)_(" + "|".join(_EVENTS) + ")")
_STATE = re.compile(r"transfers_(completed|failed|cancelled|timed_out)")

Labels = tuple[str, ...]
"""Values in the order of the metric's labels."""


def place(key: str) -> tuple[str, Labels] | None:
    """Metric and label values of one key of `stats()`; None for a sum that its parts tell already, and for what is unknown."""
    if key in _PLAIN or key in METRICS:
        return _PLAIN.get(key, key), ()
    if key in _REFUSED:
        return "refused_connections_total", (_REFUSED[key],)
    if match := _STATE.fullmatch(key):
        return "transfers_total", (match[1],)
    if match := _SERVED.fullmatch(key):
        return "served_bytes_total", (match[1],)
    return _of_nic(key) or _of_transport(key)


def _of_nic(key: str) -> tuple[str, Labels] | None:
    if match := _NIC_MOVED.fullmatch(key):
        return _MOVED[match[3]], ("rdma", match[1], match[2])
    if match := _NIC_ERRORS.fullmatch(key):
        return "errors_total", ("rdma", match[1])
    if match := _NIC_PORT.fullmatch(key):
        return "port_changes_total", (match[1], match[2])
    return None


def _of_transport(key: str) -> tuple[str, Labels] | None:
    if match := _MOVED_BY.fullmatch(key):
        # rdma's are the sums over its NICs
        return None if match[1] == "rdma" else (_MOVED[match[3]], (match[1], "", match[2]))
    if match := _EVENT.fullmatch(key):
        return _EVENTS[match[2]], (match[1],)
    return None


def values(engines: Iterable[Mapping[str, float]]) -> dict[str, dict[Labels, float]]:
    """Metric to label values to value, summed over the `stats()` of some engines."""
    found: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
    totals: defaultdict[str, float] = defaultdict(float)
    for stats in engines:
        for key, value in stats.items():
            totals[key] += value
    for key, value in totals.items():
        if (at := place(key)) is not None:
            of_name, labels = found[at[0]], at[1]
            of_name[labels] = of_name.get(labels, 0.0) + value
    return found


def samples(engines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The same by Prometheus sample name with prefix and labels, for whoever writes or sends text."""
    return {
        _sample(name, labels): value for name, by_label in values(engines).items() for labels, value in by_label.items()
    }


def _sample(name: str, labels: Labels) -> str:
    # NIC names are the kernel's: letters, digits, `_`, `-` and `.`.
    inner = ",".join(f'{label}="{value}"' for label, value in zip(METRICS[name].labels, labels, strict=True))
    return f"{PREFIX}{name}{{{inner}}}" if inner else PREFIX + name


def register(registry: CollectorRegistry, stats: Callable[[], Mapping[str, float]]) -> None:
    """Adds an engine's metrics to a registry; `stats` is its method, called at each scrape."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    class EngineCollector(Collector):
        def collect(self) -> Iterator[Family]:
            for name, by_label in values([stats()]).items():
                kind, text, labels = METRICS[name]
                family: Family
                if kind == "counter":
                    family = CounterMetricFamily(PREFIX + name.removesuffix("_total"), text, labels=labels)
                else:
                    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
                for values_of, value in by_label.items():
                    family.add_metric(values_of, value)
                yield family

    registry.register(EngineCollector())
