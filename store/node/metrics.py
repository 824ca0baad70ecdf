"""What a store node tells Prometheus. Names and meaning: docs/store.md."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from store.node.segment import NodeSegment
from transfer_engine import metrics as transfer

PREFIX = "mooncake_store_node_"


class NodeMetrics:
    """Counters of calls; gauges that look at the manifest when scraped."""

    def __init__(self, registry: CollectorRegistry, segment: NodeSegment) -> None:
        manifest = segment.manifest
        self.begins = Counter(PREFIX + "begin_puts", "Announced writes by answer", ["code"], registry=registry)
        self.ends = Counter(PREFIX + "end_puts", "Ended writes by answer", ["code"], registry=registry)
        self.fences = Counter(PREFIX + "fences", "Proofs that a writer has stopped", ["result"], registry=registry)
        self.reports = Counter(PREFIX + "reports", "Reports to a master", registry=registry)
        self.forgotten = Counter(PREFIX + "forgotten_objects", "Versions that the master dropped", registry=registry)
        self.master_errors = Counter(PREFIX + "master_errors", "Calls to the master that failed", registry=registry)
        self.mounted = Gauge(PREFIX + "mounted", "1 while a master knows this segment", registry=registry)
        gauges = {
            "segment_bytes": ("Size of the segment", lambda: segment.buffer.length),
            "objects": ("Objects held whole", lambda: len(manifest.entries)),
            "open_puts": ("Announced writes that have not ended", lambda: len(manifest.open_puts)),
        }
        transfer.register(registry, segment.engine.stats)
        for name, (text, value) in gauges.items():
            Gauge(PREFIX + name, text, registry=registry).set_function(value)
