"""What becomes of a decision that misses an SLO: HTTP 429 with the time after which trying again makes sense (paper
§7).

Retry-After comes from the same estimates as the decision: the queue shrinks by a second a second; a decoding batch
shrinks by its completion rate. A request that misses a *default* SLO even on an idle instance would miss it forever:
unless `reject_infeasible`, it is served while nothing else waits there.
Knows: a decision and settings. Does not know: how it came about, or what is charged.
"""

from __future__ import annotations

from conductor.config import ConductorConfig
from conductor.estimators import ModelEstimators
from conductor.messages import REJECTED_SATURATED, PlaceRequest, Rejection
from conductor.placement import Decision

_IDLE_QUEUE_SHARE = 0.05
"""Of the TTFT SLO: a shorter queue counts as none."""
_RETRY_AFTER_MIN_S = 0.1


def judge(
    request: PlaceRequest, decision: Decision, estimators: ModelEstimators, config: ConductorConfig, now: float
) -> Rejection | None:
    """None: admitted. Does not mutate anything."""
    wait_s, reasons = 0.0, []
    for missed in decision.schedule.rejected:
        if missed == "ttft" and not _hopeless_ttft(request, decision, config):
            excess_s = decision.estimate.ttft_s - decision.slo.ttft_s
            wait_s = max(wait_s, min(excess_s, decision.estimate.queue_s))
            reasons.append(f"first token in {decision.estimate.ttft_s:.3g} s, allowed {decision.slo.ttft_s:.3g} s")
        elif missed == "tbt" and not _hopeless_tbt(request, decision, estimators, config, now):
            excess_s = decision.estimate.tbt_s - decision.slo.tbt_s
            wait_s = max(wait_s, _drain_s(decision, excess_s, estimators, now))
            reasons.append(f"{decision.estimate.tbt_s:.3g} s between tokens, allowed {decision.slo.tbt_s:.3g} s")
    if not reasons:
        return None
    return Rejection(
        429,
        REJECTED_SATURATED,
        f"over the service level objective: {'; '.join(reasons)}",
        min(config.max_retry_after_s, max(_RETRY_AFTER_MIN_S, wait_s)),
        decision.estimate,
    )


def _hopeless_ttft(request: PlaceRequest, decision: Decision, config: ConductorConfig) -> bool:
    """Whether waiting cannot help and nothing is ahead, so that serving now is the best there is."""
    estimate = decision.estimate
    if config.reject_infeasible or request.ttft_slo_s:
        return False
    bare_s = estimate.ttft_s - estimate.queue_s
    return bare_s > decision.slo.ttft_s and estimate.queue_s <= _IDLE_QUEUE_SHARE * decision.slo.ttft_s


def _hopeless_tbt(
    request: PlaceRequest, decision: Decision, estimators: ModelEstimators, config: ConductorConfig, now: float
) -> bool:
    if config.reject_infeasible or request.tbt_slo_s:
        return False
    return decision.decode.sequences == 0


def _drain_s(decision: Decision, excess_s: float, estimators: ModelEstimators, now: float) -> float:
    d = decision.decode
    return estimators.drain_s(d.instance_id, d.sequences + 1, d.load.kv_tokens + decision.kv_tokens, excess_s, now)
