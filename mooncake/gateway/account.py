"""What others are told of one request: metrics, the Conductor, the trace. `closed` is the guard of its end.

Knows: events, times, counts. Does not know: why things happen, or what happens next.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from mooncake.common.proto import conductor_pb2 as pb
from mooncake.gateway.attempt import Attempt
from mooncake.gateway.legs import LegFailed
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.reporter import Reporter
from mooncake.gateway.sink import Sink
from mooncake.gateway.trace import RequestTrace, Try
from mooncake.gateway.usage import UsageSeen

_log = logging.getLogger(__name__)
CLIENT_GONE = 499


class Account:
    """One object a request. `label` is the model as metrics may name it."""

    def __init__(
        self, metrics: GatewayMetrics, reporter: Reporter, trace: RequestTrace, label: str, route: str
    ) -> None:
        self.metrics = metrics
        self.trace = trace
        self.usage = UsageSeen()
        self.arrived_s = time.monotonic()
        self._reporter = reporter
        self._label = label
        self._route = route
        self._placed = False
        self._chunks = 0
        self._last_chunk_s = 0.0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.arrived_s

    def _report(
        self,
        kind: pb.RequestEventKind,
        note: str,
        instance_id: str = "",
        *,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        self.trace.note(note)
        event = pb.RequestEvent(
            request_id=self.trace.request_id,
            kind=kind,
            instance_id=instance_id,
            at_s=self.age_s,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
        )
        self._reporter.report(event)

    def tokenized(self, prompt_tokens: int) -> None:
        self.trace.note("tokenized", prompt_tokens=prompt_tokens)
        self.metrics.input_tokens.labels(self._label).observe(prompt_tokens)

    def tokens_unknown(self, reason: str) -> None:
        self.trace.note("no_kv_information", reason=reason)
        self.metrics.without_kv_information.labels(self.metrics.reason(reason)).inc()

    def placed(self, attempt: Attempt, single_worker_reason: str) -> None:
        """Also listens to what happens to the attempt's prefill leg."""
        self._placed = True
        prefill, decode = attempt.prefill_worker, attempt.decode_worker
        if prefill is None:
            self.metrics.single_worker.labels(single_worker_reason).inc()
        attempt.on_prefill_started = lambda: self._prefill_started(attempt)
        attempt.on_prefill_finished = lambda: self._prefill_finished(attempt)
        self.trace.tries.append(Try(attempt.transfer_id, prefill, decode))
        names = {"prefill": prefill.name if prefill else None, "decode": decode.name}
        self.trace.note("placed", **names, transfer_id=attempt.transfer_id, fallback=attempt.placed.fallback)

    def _prefill_started(self, attempt: Attempt) -> None:
        assert attempt.prefill is not None
        self._report(pb.PREFILL_STARTED, "prefill_started", attempt.prefill.worker.instance_id)

    def _prefill_finished(self, attempt: Attempt) -> None:
        assert attempt.prefill is not None
        cached = attempt.prefill.cached_tokens or 0
        self.metrics.cached_tokens.labels(self._label).inc(cached)
        self._report(pb.PREFILL_FINISHED, "prefill_finished", attempt.prefill.worker.instance_id, cached_tokens=cached)

    def first_byte(self, attempt: Attempt) -> None:
        self.metrics.ttft.labels(self._label).observe(self.age_s)
        self._report(pb.FIRST_TOKEN, "first_token", attempt.decode_worker.instance_id)

    def chunk(self) -> None:
        """One event of a stream has left."""
        now_s = time.monotonic()
        if self._chunks:
            self.metrics.itl.labels(self._label).observe(now_s - self._last_chunk_s)
        self._last_chunk_s = now_s
        self._chunks += 1

    def leg_failed(self, failure: LegFailed) -> None:
        request_id, worker = self.trace.request_id, failure.worker
        fields = {"request_id": request_id, "leg": failure.leg, "worker": worker.name, "reason": failure.reason}
        _log.warning("a leg failed", extra={"fields": fields})
        self._report(pb.LEG_FAILED, f"{failure.leg}_failed", worker.instance_id)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with self.metrics.stage.labels(name).track_inprogress():
            yield

    @contextlib.contextmanager
    def closed(self, sink: Sink) -> Iterator[None]:
        """Whatever way the request ends, this is said of it once. Waits for nothing."""
        with self.metrics.active.track_inprogress():
            try:
                yield
            finally:
                self._close(sink)

    def _close(self, sink: Sink) -> None:
        if not sink.complete:
            self.metrics.disconnected.inc()
            self.trace.note("client_gone")
        # A stream says its length only if asked: one chunk is about one token.
        output = self.usage.completion_tokens if self.usage.known else max(0, self._chunks - 1)
        if self._placed:
            self._report(pb.FINISHED, "finished", output_tokens=output)
        self.metrics.output_tokens.labels(self._label).inc(output)
        self.metrics.e2e.labels(self._label).observe(self.age_s)
        self.metrics.requests.labels(self._label, self._route, str(sink.status or CLIENT_GONE)).inc()
