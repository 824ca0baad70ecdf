"""Algorithm 1 of the paper, "KVCache-centric Scheduling" (Mooncake, FAST'25, §6.1), as one pure function.

Line numbers in comments are the algorithm's, in short: 1 hash the prompt's blocks; 2 TTFT = inf; 3 find the best prefix
match; 4-23 for each prefill instance, 5 if best / own < threshold: 6-12 TTFT of own prefix, else 13-22 TTFT with the
best prefix transferred; 24 select d; 25-27 over an SLO: reject; 28-30 transfer the prefix if best / p's > threshold; 31
return (p, d).
Three things differ, and why:
- A prefix that an instance lacks comes from the store pool, not from a peer's memory: no instance is a transfer source,
  and no more than `pool_prefix_tokens` can be had (lines 15 and 28).
- A transfer that would not shorten this request's TTFT is not made (facts/simulation.md §6 d).
- TTFTs that differ by less than the estimates' own noise decide nothing; then the plan that computes least wins. So a
  burst of siblings waits for the first one's prefix where that is as fast as computing it again elsewhere.
Knows: candidates, numbers about them, and estimators by name. Does not know: how estimates come about (estimators.py),
who is a candidate (placement.py), what becomes of a rejection (admission.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

I = TypeVar("I")  # noqa: E741 - the paper's letter for an instance
I_contra = TypeVar("I_contra", contravariant=True)


INDIFFERENCE = 0.05
"""TTFTs that differ by this share count as equal: about the noise of one prefill."""


class Estimators(Protocol[I_contra]):
    """What Algorithm 1 asks about the future, in seconds."""

    def estimate_transfer(self, instance: I_contra, tokens: int) -> float: ...
    def estimate_queue(self, instance: I_contra) -> float: ...
    def estimate_prefill(self, instance: I_contra, prompt_tokens: int, prefix_tokens: int) -> float: ...


class Candidate(NamedTuple, Generic[I]):
    """A prefill instance and the length of the prompt's prefix that it holds itself."""

    instance: I
    prefix_tokens: int


class Prompt(NamedTuple):
    """`pool_prefix_tokens`: how much of the prompt the store pool holds."""

    tokens: int
    pool_prefix_tokens: int


class Slo(NamedTuple):
    """Seconds; infinity for none."""

    ttft_s: float
    tbt_s: float


class PrefillPlan(NamedTuple, Generic[I]):
    """One way to prefill. `prefix_tokens` are not computed; `loaded_tokens` of them come from the pool."""

    instance: I
    prefix_tokens: int
    loaded_tokens: int
    transfer_s: float
    queue_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.transfer_s + self.queue_s + self.prefill_s


class DecodePlan(NamedTuple, Generic[I]):
    instance: I
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Schedule(Generic[I]):
    """(p, d), and whether line 25 rejects it and for what."""

    prefill: PrefillPlan[I]
    decode: DecodePlan[I]
    rejected: tuple[Literal["ttft", "tbt"], ...]


def kvcache_centric_schedule(
    prompt: Prompt,
    prefill_pool: Sequence[Candidate[I]],
    select_decoding_instance: Callable[[PrefillPlan[I]], DecodePlan[I]],
    estimators: Estimators[I],
    slo: Slo,
    *,
    kvcache_balancing_threshold: float,
) -> Schedule[I]:
    """Picks (p, d). `prefill_pool` must not be empty; among equals its first wins. Does not mutate anything."""
    options: list[PrefillPlan[I]] = []
    # line 3: FindBestPrefixMatch. The pool counts: it outlives the instance that computed the prefix.
    best_prefix_tokens = max(prompt.pool_prefix_tokens, *(c.prefix_tokens for c in prefill_pool), 0)

    def plan(candidate: Candidate[I], prefix_tokens: int, queue_s: float) -> PrefillPlan[I]:
        loaded = max(0, prefix_tokens - candidate.prefix_tokens)
        return PrefillPlan(
            candidate.instance,
            prefix_tokens,
            loaded,
            estimators.estimate_transfer(candidate.instance, loaded) if loaded else 0.0,
            queue_s,
            estimators.estimate_prefill(candidate.instance, prompt.tokens, prefix_tokens),
        )

    for candidate in prefill_pool:  # line 4
        queue_s = estimators.estimate_queue(candidate.instance)  # lines 7 and 16
        # lines 6-12, cache-aware: T_queue + T_prefill(len, prefix_len)
        option = plan(candidate, candidate.prefix_tokens, queue_s)
        # line 5, turned around so that a prefix_len of 0 needs no division
        if best_prefix_tokens >= kvcache_balancing_threshold * candidate.prefix_tokens:
            # lines 13-22, cache-aware and -balancing: T_transfer(best_len - prefix_len) + T_queue + T_prefill(len,
            # best_len)
            reachable = min(best_prefix_tokens, prompt.pool_prefix_tokens)
            if reachable > candidate.prefix_tokens:
                option = min(option, plan(candidate, reachable, queue_s), key=lambda each: each.ttft_s)
        options.append(option)
    best = _fastest(options)  # lines 2, 9-11 and 18-20: TTFT and p of the fastest

    decode = select_decoding_instance(best)  # line 24: d, TBT <- SelectDecodingInstance(D)
    rejected: list[Literal["ttft", "tbt"]] = []
    if best.ttft_s > slo.ttft_s:  # lines 25-27: reject, HTTP 429
        rejected.append("ttft")
    if decode.tbt_s > slo.tbt_s:
        rejected.append("tbt")
    # lines 28-30, TransferKVCache: `loaded_tokens` tells p to load them from the pool.
    return Schedule(best, decode, tuple(rejected))  # line 31


def _fastest(options: Sequence[PrefillPlan[I]]) -> PrefillPlan[I]:
    """Least TTFT; among those that are as good as that, least computing; among equals the first."""
    limit_s = min(each.ttft_s for each in options) * (1 + INDIFFERENCE)
    return min((each for each in options if each.ttft_s <= limit_s), key=lambda each: each.prefill_s)
