"""The Conductor as a state machine without I/O (paper §3, §6): requests in, placements out; events and reports in.

Every method takes `now` (monotonic seconds); nothing here reads a clock, a socket, a random source or a set's order.
The gRPC shell (service.py) and the simulator (deploy/simulation) drive this same object.
Knows: placements in flight and what was promised for them. Does not know: who is there and holds what (fleet.py), how
choices are made (placement.py), etcd, streams, the store (callers bring `pool_prefix_tokens`), the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from conductor.admission import judge
from conductor.charges import Charge, ChargeBook, Stage, prefill_work
from conductor.config import ConductorConfig
from conductor.fleet import Fleet
from conductor.instances import Instance
from conductor.messages import (
    REJECTED_NO_ENDPOINTS,
    REJECTED_SATURATED,
    REJECTED_UNKNOWN_MODEL,
    EventKind,
    Outcome,
    Placement,
    PlaceRequest,
    PlaceResult,
    Rejection,
    RequestEvent,
    WorkerAck,
    WorkerReport,
)
from conductor.placement import Decision, MissingRole, decide
from mooncake.common.ids import InstanceId, InstanceName, RequestId

_STREAMED_TBT_SHARE = 0.3
"""Tokens that came closer together than this share of the estimated TBT were not streamed."""


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    placed: int = 0
    rejected: dict[str, int] = field(default_factory=dict)  # by reason
    degraded: int = 0
    without_kv: int = 0  # placed requests that came without block keys
    replaced: int = 0
    legs_failed: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    pool_tokens: int = 0


class Conductor:
    """See the module's text. Not thread-safe: one caller at a time, and so no two placements on one picture."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._charges = ChargeBook()
        self._alone: dict[RequestId, Charge] = {}  # of one instance: nobody may tell of the end of their prefill
        self.fleet = Fleet(config, in_use=lambda model: any(c.model == model for c in self._charges))
        self.totals = Totals()

    # --- placing ---

    def place(self, request: PlaceRequest, now: float) -> PlaceResult:
        """Chooses instances and charges them, or rejects. A request id that is placed already is placed anew."""
        self.totals.replaced += self._end(request.request_id, now) is not None
        result = self._place(request, now)
        if isinstance(result, Rejection):
            self.totals.rejected[result.reason] = self.totals.rejected.get(result.reason, 0) + 1
        return result

    def _place(self, request: PlaceRequest, now: float) -> PlaceResult:
        state = self.fleet.model(request.model)
        if state is None:
            return Rejection(404, REJECTED_UNKNOWN_MODEL, f"no instance serves the model {request.model!r}")
        if len(self._charges) >= self._config.max_in_flight:
            return Rejection(429, REJECTED_SATURATED, "too many requests in flight", self._config.max_retry_after_s)
        prefixes = self.fleet.prefix_tokens(request, now)
        decision = decide(request, self.fleet.of_model(request.model), prefixes, state, self._config, now)
        if isinstance(decision, MissingRole):
            return _nobody(request, decision)
        rejection = judge(request, decision, state.estimators, self._config, now)
        if rejection is not None:
            return rejection
        state.rotation += 1
        self._charge(request, decision, now)
        placement = _placement(decision)
        self._count(request, placement, decision)
        return placement

    def _charge(self, request: PlaceRequest, decision: Decision, now: float) -> None:
        plan = decision.schedule.prefill
        charge = Charge(
            request_id=request.request_id,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            queue=decision.prefill.queue,
            load=decision.decode.load,
            kv_tokens=decision.kv_tokens,
            estimate=decision.estimate,
            expires_at_s=now + self._config.charge_ttl_s,
            two_legs=decision.prefill is not decision.decode,
        )
        if not charge.two_legs:
            self._alone[charge.request_id] = charge
            charge.presumed_prefilled_s = now + 2 * (plan.ttft_s + decision.estimate.ttft_error_s) + 1.0
        self._charges.open(charge, prefill_work(request.prompt_tokens, plan.prefix_tokens, plan.transfer_s), now)
        until_s = now + plan.ttft_s + self._config.speculative_ttl_s
        self.fleet.expect(request, decision.prefill.instance_id, until_s)

    def _count(self, request: PlaceRequest, placement: Placement, decision: Decision) -> None:
        totals = self.totals
        totals.placed += 1
        totals.degraded += placement.degraded
        totals.without_kv += not request.block_keys
        totals.prompt_tokens += request.prompt_tokens
        totals.prefix_tokens += placement.prefix_tokens
        totals.pool_tokens += decision.schedule.prefill.loaded_tokens

    # --- what gateways saw ---

    def report(self, events: Iterable[RequestEvent], now: float) -> list[Outcome]:
        """Applies events; returns each finished request's first token beside its estimate. Unknown ones are ignored."""
        outcomes = []
        for event in events:
            charge = self._charges.get(event.request_id)
            outcome = self._apply(charge, event, now) if charge is not None else None
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _apply(self, charge: Charge, event: RequestEvent, now: float) -> Outcome | None:
        match event.kind:
            case EventKind.PREFILL_STARTED:
                charge.start_prefill(now)
            case EventKind.PREFILL_FINISHED:
                self._prefill_ended(charge, now)
                charge.prefill_end_s = event.at_s
            case EventKind.FIRST_TOKEN if charge.stage is not Stage.DECODING:
                self._prefill_ended(charge, now)
                charge.stage, charge.first_token_s = Stage.DECODING, event.at_s
            case EventKind.FINISHED:
                self._end(charge.request_id, now)
                return self._learn(charge, event, now)
            case EventKind.LEG_FAILED:
                self.totals.legs_failed += 1
                self._end(charge.request_id, now)
            case _:
                pass
        return None

    def _prefill_ended(self, charge: Charge, now: float) -> None:
        if charge.stage < Stage.PREFILLED:
            charge.end_prefill(now)
            self.fleet.computed(charge.request_id, now)

    def _learn(self, charge: Charge, end: RequestEvent, now: float) -> Outcome | None:
        """What a finished request teaches. Only now it shows whether its first token came alone."""
        state = self.fleet.model(charge.model)
        if state is None:
            return None
        state.estimators.observe_output(end.output_tokens)
        if charge.stage is not Stage.DECODING or _came_at_once(charge, end):
            return None
        if charge.two_legs and charge.prefill_end_s:
            hand_over_s = charge.first_token_s - charge.prefill_end_s
            state.estimators.observe_hand_over(charge.prompt_tokens, hand_over_s, now)
        outcome = Outcome(charge.request_id, charge.model, charge.estimate, charge.first_token_s)
        state.estimators.ttft_bar.observe(outcome.within_bar)
        return outcome

    def _end(self, request_id: RequestId, now: float) -> Charge | None:
        charge = self._charges.release(request_id, now)
        self._alone.pop(request_id, None)
        if charge is not None and charge.stage < Stage.PREFILLED:  # as far as we know, its blocks were never computed
            self.fleet.not_computed(request_id)
        return charge

    # --- what workers and the registry tell ---

    def worker_report(self, report: WorkerReport, now: float) -> WorkerAck:
        """Applies one message of a worker's stream. A gap in the sequence asks for a snapshot."""
        return self.fleet.worker_report(report, now)

    def instance_up(
        self,
        name: InstanceName,
        instance_id: InstanceId,
        model: str,
        *,
        roles: Iterable[str],
        http_url: str = "",
        block_size: int = 0,
        kv_capacity_tokens: int = 0,
    ) -> None:
        """The registry names a worker (again, with changes). A new life under a name ends the old one."""
        self.fleet.instance_up(
            Instance(name, instance_id, model, tuple(roles), http_url, block_size, kv_capacity_tokens)
        )

    def instance_down(self, instance_id: InstanceId, now: float) -> None:
        """The registry has lost a worker. One whose stream is open is a suspect until it speaks again."""
        self.fleet.instance_down(instance_id, now)

    def stream_broken(self, instance_id: InstanceId, now: float) -> None:
        """A worker's stream ended: a suspect from now on, gone when the registry agrees or the grace is over."""
        self.fleet.stream_broken(instance_id, now)

    def tick(self, now: float) -> None:
        """Call about once a second: ends charges, speculation and suspects whose time is over."""
        for charge in self._charges.expire(now):
            self.totals.expired += 1
            self._alone.pop(charge.request_id, None)
            self.fleet.not_computed(charge.request_id)
        for charge in [c for c in self._alone.values() if c.presumed_prefilled_s <= now]:
            del self._alone[charge.request_id]
            self._prefill_ended(charge, now)
        self.fleet.tick(now)

    def begin_term(self, now: float) -> None:
        """This Conductor leads from now on: what it placed in an earlier term has been reported to somebody else."""
        for charge in list(self._charges):
            self._end(charge.request_id, now)

    # --- looking inside ---

    @property
    def in_flight(self) -> int:
        """Placed requests that have not ended."""
        return len(self._charges)

    def queue_s(self, instance: Instance, now: float) -> float:
        """Estimated prefill work that waits on an instance."""
        state = self.fleet.model(instance.model)
        if state is None:
            return 0.0
        return state.estimators.queue_s(instance.instance_id, instance.queue, instance.foreign_waiting, now)


def _came_at_once(charge: Charge, end: RequestEvent) -> bool:
    """Whether the answer was not streamed: its "first token" then came with its last and says nothing of TTFT."""
    apart_s = end.at_s - charge.first_token_s
    return end.output_tokens > 1 and apart_s < _STREAMED_TBT_SHARE * charge.estimate.tbt_s * (end.output_tokens - 1)


def _placement(decision: Decision) -> Placement:
    plan, alone = decision.schedule.prefill, decision.prefill is decision.decode
    return Placement(
        prefill=None if alone else decision.prefill.chosen,
        decode=decision.decode.chosen,
        prefix_tokens=plan.prefix_tokens - plan.loaded_tokens,
        pool_prefix_tokens=plan.prefix_tokens if plan.loaded_tokens else 0,
        estimate=decision.estimate,
        degraded=decision.degraded,
    )


def _nobody(request: PlaceRequest, missing: MissingRole) -> Rejection:
    pin = request.pin_prefill if missing.role == "prefill" else request.pin_decode
    who = f"instance {pin!r}" if pin else f"{missing.role} instance"
    text = f"no {who} that could serve {request.prompt_tokens} tokens of {request.model!r} is available"
    return Rejection(503, REJECTED_NO_ENDPOINTS, text, retry_after_s=1.0)
