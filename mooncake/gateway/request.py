"""The life of one request (DESIGN.md §2, paper §3): tokenize, place, both legs, relay; again elsewhere when a leg failed before the first byte.

However it ends (answered, rejected, failed, deadline passed, client gone at any stage), the attempt is closed (legs, transfer) and the
account too (Conductor, metrics). Knows: the order of things. Does not know: how a leg, a placement or a token is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from mooncake.common.errors import DeadlineExceeded, MooncakeError, UpstreamFailed
from mooncake.gateway.account import Account
from mooncake.gateway.attempt import Attempt, Wires
from mooncake.gateway.config import GatewayConfig
from mooncake.gateway.conversation import NoKVInformation
from mooncake.gateway.decode_leg import DecodeLeg
from mooncake.gateway.directory import Model
from mooncake.gateway.legs import EngineRejected, LegFailed
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.openai import Call
from mooncake.gateway.placement import Placed, Placer, Rejected, Wish
from mooncake.gateway.prompt import NOT_TEXT, Prompts, rough_tokens
from mooncake.gateway.render import Rendered
from mooncake.gateway.sink import Sink
from mooncake.gateway.tokenizer_pool import too_long
from mooncake.gateway.trace import RequestTrace
from mooncake.gateway.usage import rewrite_body, rewrite_event

SETTLE_S = 0.25
LAST_WORD_S = 2.0


@dataclass(frozen=True)
class Parts:
    """What all requests of a gateway share."""

    config: GatewayConfig
    metrics: GatewayMetrics
    prompts: Prompts
    placer: Placer
    wires: Wires
    lives: set[RequestLife] = field(default_factory=set)
    """Requests in flight."""


@dataclass(frozen=True)
class Asked:
    """What a request's headers ask for."""

    pin_prefill: str = ""
    pin_decode: str = ""
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0


class RequestLife:
    """`run()` once."""

    def __init__(self, parts: Parts, call: Call, model: Model, asked: Asked, trace: RequestTrace) -> None:
        self._parts = parts
        self._call = call
        self._model = model
        self._asked = asked
        self._id = trace.request_id
        label = parts.metrics.model(model.lora or model.name)
        self._account = Account(parts.metrics, parts.placer.reporter, trace, label, str(call.route))
        self._deadline_s = self._account.arrived_s + parts.config.request_deadline_s
        self._timeout = asyncio.timeout(parts.config.request_deadline_s)
        self._late: MooncakeError = DeadlineExceeded(
            f"The request did not end within {parts.config.request_deadline_s:g} s."
        )

    def end_now(self, error: MooncakeError) -> None:
        """The gateway ends: so does the request, with an error that its client sees."""
        self._late = error
        with contextlib.suppress(RuntimeError):  # not begun, or ended already
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def run(self, sink: Sink) -> None:
        """Answers the client. Raises nothing but CancelledError (the client is gone)."""
        with self._account.closed(sink), self._listed():
            try:
                async with self._timeout:
                    prompt = await self._tokenize()
                    with contextlib.closing(await self._answered(prompt)) as attempt:
                        await self._relay(attempt, sink)
            except TimeoutError:
                await self._fail(sink, self._late, "deadline")
            except EngineRejected as rejected:
                headers = {"retry-after": rejected.retry_after} if rejected.retry_after else {}
                await sink.whole(rejected.status, rejected.body, headers)
            except LegFailed as failure:
                self._leg_failed(failure)
                text = f"The request failed on a worker: {failure.leg}: {failure.reason}."
                await self._fail(sink, UpstreamFailed(text), failure.leg)
            except MooncakeError as error:
                await self._fail(sink, error, "error")

    @contextlib.contextmanager
    def _listed(self) -> Iterator[None]:
        self._parts.lives.add(self)
        try:
            yield
        finally:
            self._parts.lives.discard(self)

    async def _fail(self, sink: Sink, error: MooncakeError, reason: str) -> None:
        if sink.status:
            self._parts.metrics.stream_errors.labels(reason).inc()
        self._account.trace.note("failed", reason=str(error))
        with contextlib.suppress(TimeoutError):  # a client that reads nothing must not hold the request open
            async with asyncio.timeout(LAST_WORD_S):
                await sink.error(error)

    # --- the stages ---

    async def _tokenize(self) -> Rendered | None:
        """None: the gateway does not know the tokens, so one worker serves the whole request."""
        single = self._call.single_worker_reason
        if single in NOT_TEXT:
            return None
        try:
            with self._account.stage("tokenize"):
                prompt = await self._parts.prompts.tokenize(self._call, self._model)
        except NoKVInformation as unknown:
            self._account.tokens_unknown(str(unknown))
            return None
        self._account.tokenized(prompt.prompt_tokens)
        if single is None and prompt.prompt_tokens >= self._model.max_model_len:
            raise too_long(prompt.prompt_tokens, self._model.max_model_len)  # no room for a single output token
        return prompt

    async def _answered(self, prompt: Rendered | None) -> Attempt:
        """An attempt whose first bytes are here. Raises what ends the request: LegFailed when no retry is left."""
        failures: list[LegFailed] = []
        for left in range(self._parts.config.max_retries, -1, -1):
            attempt = self._attempt(await self._place(prompt, failures), prompt)
            try:
                with self._account.stage("decode" if attempt.prefill is None else "prefill"):
                    await attempt.open()
                return attempt
            except LegFailed as failure:
                attempt.close()
                if not left:
                    raise
                self._leg_failed(failure)
                self._parts.metrics.retries.labels(failure.leg).inc()
                failures.append(failure)
            except BaseException:
                attempt.close()
                raise
        raise AssertionError("unreachable")

    async def _place(self, prompt: Rendered | None, failures: list[LegFailed]) -> Placed:
        failed = frozenset(failure.worker.instance_id for failure in failures)
        try:
            with self._account.stage("place"):
                return await self._parts.placer.place(self._wish(prompt), failed)
        except Rejected:
            if failures and not failures[-1].counts:
                raise failures[-1] from None  # not a lack of capacity: this request fails wherever it goes
            raise

    def _wish(self, prompt: Rendered | None) -> Wish:
        call, asked = self._call, self._asked
        name = self._model.lora or self._model.name
        return Wish(
            request_id=self._id,
            model=self._parts.wires.directory.model(name) or self._model,
            block_keys=prompt.block_keys if prompt is not None else b"",
            prompt_tokens=prompt.prompt_tokens if prompt is not None else rough_tokens(call),
            max_output_tokens=call.max_output_tokens,
            ttft_slo_s=asked.ttft_slo_s,
            tbt_slo_s=asked.tbt_slo_s,
            arrived_s=self._account.arrived_s,
            priority=call.priority,
            single_worker=prompt is None or call.single_worker_reason is not None,
            pin_prefill=asked.pin_prefill,
            pin_decode=asked.pin_decode,
        )

    def _attempt(self, placed: Placed, prompt: Rendered | None) -> Attempt:
        single = self._call.single_worker_reason
        legs_prompt = prompt if single is None else None
        left_s = self._deadline_s - time.monotonic()
        attempt = Attempt(self._parts.wires, self._call, self._model, legs_prompt, placed, self._id, left_s)
        self._account.placed(attempt, single or ("no_kv_information" if prompt is None else "placement"))
        return attempt

    async def _relay(self, attempt: Attempt, sink: Sink) -> None:
        assert attempt.decode is not None
        with self._account.stage("relay"):
            self._account.first_byte(attempt)
            if attempt.decode.is_stream:
                await self._relay_stream(attempt, attempt.decode, sink)
            else:
                await self._relay_whole(attempt, attempt.decode, sink)
        for worker in attempt.workers:
            self._parts.wires.directory.succeeded(worker)

    async def _relay_whole(self, attempt: Attempt, decode: DecodeLeg, sink: Sink) -> None:
        await attempt.settle(SETTLE_S)
        try:
            body = rewrite_body(decode.body, attempt.cached_tokens, self._account.usage)
        except msgspec.DecodeError:
            raise LegFailed("decode", decode.worker, "its answer is not JSON") from None
        await sink.whole(200, body, served_by(attempt), decode.content_type)

    async def _relay_stream(self, attempt: Attempt, decode: DecodeLeg, sink: Sink) -> None:
        await sink.start(decode.content_type, served_by(attempt))
        async for event in decode.events():
            if b'"usage"' in event:
                await attempt.settle(SETTLE_S)
            await sink.write(rewrite_event(event, attempt.cached_tokens, self._account.usage))
            self._account.chunk()
        await sink.end()

    def _leg_failed(self, failure: LegFailed) -> None:
        self._account.leg_failed(failure)
        if failure.counts:
            self._parts.wires.directory.failed(failure.worker)


def served_by(attempt: Attempt) -> dict[str, str]:
    prefill = attempt.prefill_worker or attempt.decode_worker
    return {"x-mooncake-prefill-instance": prefill.name, "x-mooncake-decode-instance": attempt.decode_worker.name}
