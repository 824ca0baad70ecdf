"""The life of one request (DESIGN.md §2, paper §3): tokenize, place, both legs, relay; again elsewhere when a leg failed before the first byte.

However it ends (answered, rejected, failed, deadline passed, client gone at any stage), `_closed` runs once: legs are closed, transfers
released, the Conductor told, counters returned. Knows: the order of things. Does not know: how a leg, a placement or a token is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from mooncake.common.errors import DeadlineExceeded, MooncakeError, UpstreamFailed
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.gateway.attempt import Attempt, Wires
from mooncake.gateway.config import GatewayConfig
from mooncake.gateway.conversation import NoKVInformation
from mooncake.gateway.decode_leg import DecodeLeg
from mooncake.gateway.directory import Model
from mooncake.gateway.legs import EngineRejected, LegFailed
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.openai import Call, Route, single_prompt
from mooncake.gateway.parity import Parity
from mooncake.gateway.placement import Placed, Placer, Rejected, Wish
from mooncake.gateway.render import Rendered, RenderJob
from mooncake.gateway.sink import Sink
from mooncake.gateway.tokenizer_pool import TokenizerPool, too_long
from mooncake.gateway.trace import RequestTrace, Try
from mooncake.gateway.usage import UsageSeen, rewrite_body, rewrite_event

_log = logging.getLogger(__name__)
SETTLE_S = 0.25
LAST_WORD_S = 2.0
CLIENT_GONE = 499


@dataclass(frozen=True)
class Parts:
    """What all requests of a gateway share."""

    config: GatewayConfig
    metrics: GatewayMetrics
    pool: TokenizerPool
    parity: Parity
    placer: Placer
    wires: Wires


@dataclass(frozen=True)
class Asked:
    """What a request's headers ask for."""

    pin_prefill: str = ""
    pin_decode: str = ""
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0


class RequestLife:
    """`run()` once."""

    def __init__(
        self, parts: Parts, call: Call, model: Model, request_id: str, asked: Asked, trace: RequestTrace
    ) -> None:
        self._parts = parts
        self._call = call
        self._model = model
        self._id = request_id
        self._asked = asked
        self._trace = trace
        self._label = parts.metrics.model(model.lora or model.name)
        self._arrived_s = time.monotonic()
        self._deadline_s = self._arrived_s + parts.config.request_deadline_s
        self._placed_once = False
        self._last_failure: LegFailed | None = None
        self._usage = UsageSeen()
        self._chunks = 0

    async def run(self, sink: Sink) -> None:
        """Answers the client. Raises nothing but CancelledError (the client is gone)."""
        with self._closed(sink):
            try:
                async with asyncio.timeout(self._deadline_s - time.monotonic()):
                    prompt = await self._tokenize()
                    attempt = await self._answered(prompt)
                    with contextlib.closing(attempt):
                        await self._relay(attempt, sink)
            except TimeoutError:
                await self._fail(
                    sink,
                    DeadlineExceeded(f"The request did not end within {self._parts.config.request_deadline_s:g} s."),
                    "deadline",
                )
            except EngineRejected as rejected:
                headers = {"retry-after": rejected.retry_after} if rejected.retry_after else {}
                await sink.whole(rejected.status, rejected.body, headers)
            except LegFailed as failure:
                self._failed(failure)
                await self._fail(
                    sink,
                    UpstreamFailed(f"The request failed on a worker: {failure.leg}: {failure.reason}."),
                    failure.leg,
                )
            except MooncakeError as error:
                await self._fail(sink, error, "error")

    async def _fail(self, sink: Sink, error: MooncakeError, reason: str) -> None:
        if sink.status:
            self._parts.metrics.stream_errors.labels(reason).inc()
        self._trace.note("failed", reason=str(error))
        with contextlib.suppress(TimeoutError):  # a client that reads nothing must not hold the request open
            async with asyncio.timeout(LAST_WORD_S):
                await sink.error(error)

    # --- the stages ---

    async def _tokenize(self) -> Rendered | None:
        """None: the gateway does not know the tokens, so one worker serves the whole request."""
        reason = self._call.single_worker_reason
        if reason in ("media", "prompt_embeds", "several_prompts", "suffix"):
            return None
        with self._stage("tokenize"):
            try:
                prompt = await self._token_ids()
            except NoKVInformation as unknown:
                self._parts.metrics.without_kv_information.labels(self._parts.metrics.reason(str(unknown))).inc()
                self._trace.note("no_kv_information", reason=str(unknown))
                return None
        self._trace.note("tokenized", prompt_tokens=prompt.prompt_tokens)
        self._parts.metrics.input_tokens.labels(self._label).observe(prompt.prompt_tokens)
        if reason is None and prompt.prompt_tokens >= self._model.max_model_len:
            raise too_long(prompt.prompt_tokens, self._model.max_model_len)  # no room for a single output token
        return prompt

    async def _token_ids(self) -> Rendered:
        call, model, pool = self._call, self._model, self._parts.pool
        chat = call.route is Route.CHAT
        prompt = None if chat else single_prompt(call.body)
        job = RenderJob(
            model.model_path,
            model.name,
            model.fingerprint,
            model.block_size,
            model.max_model_len,
            chat,
            call.body,
            prompt,
            model.lora,
            call.cache_salt,
            self._parts.config.trust_request_chat_template,
        )
        if self._parts.wires.directory.tokenizes_alike(model) or isinstance(prompt, list):
            return await pool.render(job)
        return await pool.pack(await self._parts.parity.worker_tokens(model, call), job)

    async def _answered(self, prompt: Rendered | None) -> Attempt:
        """An attempt whose first bytes are here. Raises what ends the request: LegFailed when no retry is left."""
        failed: set[str] = set()
        for left in range(self._parts.config.max_retries, -1, -1):
            placed = await self._place(prompt, frozenset(failed))
            attempt = self._attempt(placed, prompt)
            try:
                with self._stage("decode" if attempt.prefill is None else "prefill"):
                    await attempt.open()
                return attempt
            except LegFailed as failure:
                attempt.close()
                self._last_failure = failure
                if not left:
                    raise
                self._failed(failure)
                failed.add(failure.worker.instance_id)
                self._parts.metrics.retries.labels(failure.leg).inc()
            except BaseException:
                attempt.close()
                raise
        raise AssertionError("unreachable")

    async def _place(self, prompt: Rendered | None, failed: frozenset[str]) -> Placed:
        try:
            with self._stage("place"):
                placed = await self._parts.placer.place(self._wish(prompt), failed)
        except Rejected:
            if self._last_failure is not None and not self._last_failure.counts:
                raise self._last_failure from None  # not a lack of capacity: this request fails wherever it goes
            raise
        self._placed_once = True
        return placed

    def _wish(self, prompt: Rendered | None) -> Wish:
        call, asked = self._call, self._asked
        return Wish(
            request_id=self._id,
            model=self._parts.wires.directory.model(self._model.lora or self._model.name) or self._model,
            block_keys=prompt.block_keys if prompt is not None else b"",
            prompt_tokens=prompt.prompt_tokens if prompt is not None else rough_tokens(call),
            max_output_tokens=call.max_output_tokens,
            ttft_slo_s=asked.ttft_slo_s,
            tbt_slo_s=asked.tbt_slo_s,
            priority=call.priority,
            single_worker=prompt is None or call.single_worker_reason is not None,
            pin_prefill=asked.pin_prefill,
            pin_decode=asked.pin_decode,
        )

    def _attempt(self, placed: Placed, prompt: Rendered | None) -> Attempt:
        if self._call.single_worker_reason is not None:
            prompt = None
        left_s = self._deadline_s - time.monotonic()
        attempt = Attempt(self._parts.wires, self._call, self._model, prompt, placed, self._id, left_s)
        prefill = attempt.prefill_worker
        if prefill is None:
            reason = self._call.single_worker_reason or ("no_kv_information" if prompt is None else "placement")
            self._parts.metrics.single_worker.labels(reason).inc()
        else:
            attempt.on_prefill_started = lambda: self._report(
                pb.PREFILL_STARTED, "prefill_started", prefill.instance_id
            )
            attempt.on_prefill_finished = lambda: self._prefill_finished(attempt)
        self._trace.tries.append(Try(attempt.transfer_id, prefill, attempt.decode_worker))
        self._trace.note(
            "placed",
            prefill=prefill.name if prefill else None,
            decode=placed.decode.name,
            transfer_id=attempt.transfer_id,
        )
        return attempt

    async def _relay(self, attempt: Attempt, sink: Sink) -> None:
        assert attempt.decode is not None
        with self._stage("relay"):
            self._first_byte(attempt)
            if attempt.decode.is_stream:
                await self._relay_stream(attempt, attempt.decode, sink)
            else:
                await self._relay_whole(attempt, attempt.decode, sink)
        for worker in (attempt.decode_worker, attempt.prefill_worker):
            if worker is not None:
                self._parts.wires.directory.succeeded(worker)

    async def _relay_whole(self, attempt: Attempt, decode: DecodeLeg, sink: Sink) -> None:
        await attempt.settle(SETTLE_S)
        try:
            body = rewrite_body(decode.body, attempt.cached_tokens, self._usage)
        except msgspec.DecodeError:
            raise LegFailed("decode", decode.worker, "its answer is not JSON") from None
        await sink.whole(200, body, served_by(attempt), decode.content_type)

    async def _relay_stream(self, attempt: Attempt, decode: DecodeLeg, sink: Sink) -> None:
        await sink.start(decode.content_type, served_by(attempt))
        last_s = 0.0
        async for event in decode.events():
            if b'"usage"' in event:
                await attempt.settle(SETTLE_S)
            await sink.write(rewrite_event(event, attempt.cached_tokens, self._usage))
            now_s = time.monotonic()
            if last_s:
                self._parts.metrics.itl.labels(self._label).observe(now_s - last_s)
            last_s = now_s
            self._chunks += 1
        await sink.end()

    # --- what others are told ---

    def _report(
        self,
        kind: pb.RequestEventKind,
        note: str,
        instance_id: str = "",
        *,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        self._trace.note(note)
        at_s = time.monotonic() - self._arrived_s
        event = pb.RequestEvent(
            request_id=self._id,
            kind=kind,
            instance_id=instance_id,
            at_s=at_s,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
        )
        self._parts.placer.report(event)

    def _prefill_finished(self, attempt: Attempt) -> None:
        assert attempt.prefill is not None
        cached = attempt.prefill.cached_tokens or 0
        self._parts.metrics.cached_tokens.labels(self._label).inc(cached)
        self._report(pb.PREFILL_FINISHED, "prefill_finished", attempt.prefill.worker.instance_id, cached_tokens=cached)

    def _first_byte(self, attempt: Attempt) -> None:
        self._parts.metrics.ttft.labels(self._label).observe(time.monotonic() - self._arrived_s)
        self._report(pb.FIRST_TOKEN, "first_token", attempt.decode_worker.instance_id)

    def _failed(self, failure: LegFailed) -> None:
        fields = {"request_id": self._id, "leg": failure.leg, "worker": failure.worker.name, "reason": failure.reason}
        _log.warning("a leg failed", extra={"fields": fields})
        if failure.counts:
            self._parts.wires.directory.failed(failure.worker)
        self._report(pb.LEG_FAILED, f"{failure.leg}_failed", failure.worker.instance_id)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self._parts.metrics.stage.labels(name).track_inprogress():
            yield

    @contextlib.contextmanager
    def _closed(self, sink: Sink) -> Iterator[None]:
        """The one guard of a request's end; it waits for nothing."""
        metrics = self._parts.metrics
        with metrics.active.track_inprogress():
            try:
                yield
            finally:
                if not sink.complete:
                    metrics.disconnected.inc()
                    self._trace.note("client_gone")
                # A stream says its length only if asked: one chunk is about one token.
                output = self._usage.completion_tokens if self._usage.known else max(0, self._chunks - 1)
                if self._placed_once:
                    self._report(pb.FINISHED, "finished", output_tokens=output)
                metrics.output_tokens.labels(self._label).inc(output)
                metrics.e2e.labels(self._label).observe(time.monotonic() - self._arrived_s)
                metrics.requests.labels(self._label, str(self._call.route), str(sink.status or CLIENT_GONE)).inc()


def served_by(attempt: Attempt) -> dict[str, str]:
    prefill = attempt.prefill_worker or attempt.decode_worker
    return {"x-mooncake-prefill-instance": prefill.name, "x-mooncake-decode-instance": attempt.decode_worker.name}


def rough_tokens(call: Call) -> int:
    """A prompt's length when its tokens are not known: about four bytes each."""
    asked = call.body.get("messages") if call.route is Route.CHAT else call.body.get("prompt")
    return max(1, len(msgspec.json.encode(asked)) // 4)
