"""What a gateway counts. Label values that clients choose are capped: an unknown model is `other`.

Knows: names, labels, buckets. Does not know: who counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

MODELS_KEPT = 1000
REASONS_KEPT = 50
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
STAGES = ("tokenize", "place", "prefill", "decode", "relay")


class GatewayMetrics:
    """One object a gateway, on that gateway's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._models: set[str] = set()
        self._reasons: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mooncake_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mooncake_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"mooncake_gateway_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests_total", "Answered requests (499: the client left before an answer)", "model", "route", "status"
        )
        self.active = gauge("active_requests", "Requests in flight")
        self.stage = gauge("stage_requests", "Requests in flight by stage", "stage")
        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first byte of the answer", _LATENCY_S, "model"
        )
        self.itl = histogram("inter_token_latency_seconds", "Between two chunks of a stream", _ITL_S, "model")
        self.e2e = histogram("request_duration_seconds", "From arrival to the last byte", _LATENCY_S, "model")
        self.input_tokens = histogram("input_sequence_tokens", "Prompt lengths", _TOKENS, "model")
        self.output_tokens = counter("output_tokens_total", "Generated tokens", "model")
        self.cached_tokens = counter("cached_tokens_total", "Prompt tokens that no prefill had to compute", "model")
        self.disconnected = counter("disconnected_clients_total", "Clients that left before their answer was complete")
        self.retries = counter("retries_total", "Requests that were placed again", "leg")
        self.stream_errors = counter("stream_errors_total", "Streams that ended with an error event", "reason")
        self.placement_fallback = counter("placement_fallback_total", "Requests placed without the Conductor", "reason")
        self.rejections = counter("rejections_total", "Requests that the Conductor rejected", "reason")
        self.without_kv_information = counter(
            "requests_without_kv_information_total", "Requests whose tokens the gateway did not know", "reason"
        )
        self.single_worker = counter(
            "single_worker_requests_total", "Requests that one worker served as a whole", "reason"
        )
        self.stripped = counter("stripped_fields_total", "Fields that clients must not send", "field")
        self.tokenizer_seconds = histogram(
            "tokenizer_seconds", "Rendering and tokenizing, waiting included", _LATENCY_S
        )
        self.tokenizer_queue = gauge("tokenizer_queue", "Requests at the tokenizer processes")
        self.tokenizer_restarts = counter("tokenizer_restarts_total", "Tokenizer processes that were replaced")
        self.tokenizer_mismatch = gauge(
            "tokenizer_mismatch", "1: this worker tokenizes otherwise than the gateway", "model", "instance"
        )
        self.reports_lost = counter("reports_lost_total", "Request events that never reached the Conductor")
        self.circuit_open = gauge("circuit_open", "1: this instance is avoided", "instance")
        self.instances = gauge("instances", "Workers that the gateway knows", "model", "role")

    def know_models(self, models: set[str]) -> None:
        """Names that may be label values."""
        self._models |= set(sorted(models - self._models)[: MODELS_KEPT - len(self._models)])

    def model(self, name: str | None) -> str:
        return name if name in self._models else "other"

    def reason(self, text: str) -> str:
        """A label for a reason that may quote the client: its first words, and of those only so many."""
        label = text.partition(":")[0][:40]
        if label not in self._reasons and len(self._reasons) < REASONS_KEPT:
            self._reasons.add(label)
        return label if label in self._reasons else "other"

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[None]:
        start = time.monotonic()
        with self.tokenizer_queue.track_inprogress():
            yield
        self.tokenizer_seconds.observe(time.monotonic() - start)
