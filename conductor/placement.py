"""Policy around Algorithm 1: who is a candidate, which decoding instance, when one instance serves alone (paper §6,
§7).

- The decoding instance is the one with the least predicted TBT after joining, counting every sequence that is on its
  way there (facts/simulation.md §6: by count, not by KV tokens; in-flight requests count). One without room in its
  KVCache comes last.
- One instance serves alone when the request says so, when nobody is left to prefill (degraded), or when a mixed
  decoding instance has next to nothing to compute.
- Equals are taken in order of name, beginning one further each time.
Knows: instances, estimators, settings. Does not know: charges' lifetimes, the index, rejections' wording (core,
admission).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from conductor.algorithm import Candidate, DecodePlan, PrefillPlan, Prompt, Schedule, Slo, kvcache_centric_schedule
from conductor.charges import prefill_work
from conductor.config import ConductorConfig
from conductor.estimators import ModelEstimators
from conductor.instances import Instance, eligible
from conductor.messages import DECODE, PREFILL, Estimate, PlaceRequest
from mooncake.common.ids import InstanceId

T = TypeVar("T")


@dataclass(slots=True)
class ModelState:
    """What is kept of a served model besides its instances."""

    estimators: ModelEstimators
    rotation: int = 0


class MissingRole(NamedTuple):
    """Nobody alive can take that part of the request."""

    role: Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Algorithm 1's answer for one request, before admission. `prefill is decode` when one instance serves alone."""

    prefill: Instance
    decode: Instance
    schedule: Schedule[Instance]
    estimate: Estimate
    slo: Slo
    kv_tokens: int
    degraded: bool


class _At:
    """Algorithm 1's estimators at one moment."""

    def __init__(self, estimators: ModelEstimators, now: float) -> None:
        self._estimators = estimators
        self._now = now

    def estimate_transfer(self, instance: Instance, tokens: int) -> float:
        return self._estimators.transfer_s(tokens)

    def estimate_queue(self, instance: Instance) -> float:
        foreign = instance.foreign_waiting
        return self._estimators.queue_s(instance.instance_id, instance.queue, foreign, self._now)

    def estimate_prefill(self, instance: Instance, prompt_tokens: int, prefix_tokens: int) -> float:
        work = prefill_work(prompt_tokens, prefix_tokens)
        return self._estimators.prefill_s(instance.instance_id, work, self._now)


def decide(
    request: PlaceRequest,
    instances: Sequence[Instance],
    prefix_tokens: Mapping[InstanceId, int],
    state: ModelState,
    config: ConductorConfig,
    now: float,
) -> Decision | MissingRole:
    """Does not mutate anything. `prefix_tokens`: how much of the prompt each instance holds."""
    kv_tokens = request.prompt_tokens + _expected_output(request, state.estimators) // 2
    fits = request.prompt_tokens + 1
    decoders = eligible(instances, DECODE, exclude=request.exclude, pin=request.pin_decode, tokens=fits)
    if not decoders:
        return MissingRole("decode")
    prefillers = eligible(instances, PREFILL, exclude=request.exclude, pin=request.pin_prefill, tokens=fits)
    if not prefillers and request.pin_prefill and not request.single_worker:
        return MissingRole("prefill")
    decoders, prefillers = _rotated(decoders, state.rotation), _rotated(prefillers, state.rotation)

    degraded = not prefillers and not request.single_worker
    joined = _select_decoding(decoders, kv_tokens, state.estimators, now)
    if request.single_worker or degraded:
        alone = sorted(decoders, key=lambda each: each.sequences)
    elif not request.pin_prefill and _next_to_nothing(request, joined.instance, prefix_tokens, config):
        alone = [joined.instance]
    else:
        alone = []

    def select(plan: PrefillPlan[Instance]) -> DecodePlan[Instance]:
        return _join(plan.instance, kv_tokens, state.estimators, now) if alone else joined

    hand_over_s = 0.0 if alone else state.estimators.hand_over_s(request.prompt_tokens)
    slo = Slo(
        request.ttft_slo_s or config.ttft_slo_s or float("inf"), request.tbt_slo_s or config.tbt_slo_s or float("inf")
    )
    schedule = kvcache_centric_schedule(
        Prompt(request.prompt_tokens, request.pool_prefix_tokens),
        [Candidate(each, prefix_tokens.get(each.instance_id, 0)) for each in alone or prefillers],
        select,
        _At(state.estimators, now),
        Slo(slo.ttft_s - request.elapsed_s - hand_over_s, slo.tbt_s),
        kvcache_balancing_threshold=config.kvcache_balancing_threshold,
    )
    estimate = _estimate(request, schedule, hand_over_s, kv_tokens, state.estimators, now)
    return Decision(schedule.prefill.instance, schedule.decode.instance, schedule, estimate, slo, kv_tokens, degraded)


def _select_decoding(
    decoders: Sequence[Instance], kv_tokens: int, estimators: ModelEstimators, now: float
) -> DecodePlan[Instance]:
    """SelectDecodingInstance of Algorithm 1."""

    def cost(plan: DecodePlan[Instance]) -> tuple[bool, float, int]:
        each = plan.instance
        crowded = each.kv_capacity_tokens and each.load.kv_tokens + kv_tokens > each.kv_capacity_tokens
        return bool(crowded), plan.tbt_s, each.sequences

    return min((_join(each, kv_tokens, estimators, now) for each in decoders), key=cost)


def _join(each: Instance, kv_tokens: int, estimators: ModelEstimators, now: float) -> DecodePlan[Instance]:
    """TBT when one more sequence has joined."""
    batch, total = each.sequences + 1, each.load.kv_tokens + kv_tokens
    return DecodePlan(each, estimators.tbt_s(each.instance_id, batch, total, now))


def _next_to_nothing(
    request: PlaceRequest, decoder: Instance, prefix_tokens: Mapping[InstanceId, int], config: ConductorConfig
) -> bool:
    """Whether a mixed decoding instance had better compute the prompt itself."""
    known = prefix_tokens.get(decoder.instance_id, 0)
    return PREFILL in decoder.roles and request.prompt_tokens - known <= config.skip_prefill_tokens


def _expected_output(request: PlaceRequest, estimators: ModelEstimators) -> int:
    expected = int(estimators.output_tokens)
    return min(expected, request.max_output_tokens) if request.max_output_tokens else expected


def _estimate(
    request: PlaceRequest,
    schedule: Schedule[Instance],
    hand_over_s: float,
    kv_tokens: int,
    estimators: ModelEstimators,
    now: float,
) -> Estimate:
    p, d = schedule.prefill, schedule.decode
    own = prefill_work(request.prompt_tokens, p.prefix_tokens)
    hand_over_tokens = request.prompt_tokens if hand_over_s else 0
    return Estimate(
        transfer_s=p.transfer_s,
        queue_s=p.queue_s,
        prefill_s=p.prefill_s,
        ttft_s=request.elapsed_s + p.ttft_s + hand_over_s,
        ttft_error_s=estimators.ttft_error_s(
            p.instance.instance_id, p.instance.queue.total, own, p.loaded_tokens, hand_over_tokens, now
        ),
        tbt_s=d.tbt_s,
        tbt_error_s=estimators.tbt_error_s(
            d.instance.instance_id, d.instance.sequences + 1, d.instance.load.kv_tokens + kv_tokens, now
        ),
    )


def _rotated(items: list[T], by: int) -> list[T]:
    start = by % len(items) if items else 0
    return items[start:] + items[:start]
