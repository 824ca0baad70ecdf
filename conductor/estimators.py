"""How long things take on this cluster, learned from what workers and gateways measure (paper §6.1: predictive models).

- prefill      T(n, p) = c0 + c1 (n - p) + c2 (n^2 - p^2) + c3 p     from PrefillSample  (form: facts/simulation.md §3)
- decode step  TBT(b, K) = a + cb (b - 1) + ck K                      from DecodeSample
- pool load    a + c tokens                                           from LoadSample
- hand-over    a + c n, end of prefill to first token at the gateway  from request events
Each instance has its own curves and falls back to its model's pooled ones while it has few or only old samples. Priors
are fast: a fresh cluster promises too much rather than reject. Every estimate is a mean and the half-width of an error
bar.
Knows: token counts and seconds. Does not know: instances' state, requests, clocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from conductor.charges import PrefillQueue, Work, prefill_work
from conductor.messages import DecodeSample, LoadSample, PrefillSample
from conductor.regression import BAR_SIGMAS, OnlineFit
from mooncake.common.ids import InstanceId

# Shapes: an 8xA800 node with a 70B model, the paper's hardware. Only the proportions matter (regression.py).
_PREFILL_SHAPE = (0.067, 1.10, 0.074, 0.026)
_DECODE_SHAPE = (0.026, 0.0037, 0.0035)
_LOAD_SHAPE = (0.002, 0.04)
_HAND_OVER_SHAPE = (0.03, 0.01)
_FRESH_LEVEL = 0.1

_OWN_SAMPLES = 12
"""An instance's own curve is trusted from here on."""
_OWN_AGE_S = 120.0
"""... and until its last sample is this old: an instance that looks slow is avoided and would never be measured again.
"""


class TimeEstimate(NamedTuple):
    mean_s: float
    variance_s2: float

    def plus(self, other: TimeEstimate) -> TimeEstimate:
        """Sum of independent times."""
        return TimeEstimate(self.mean_s + other.mean_s, self.variance_s2 + other.variance_s2)

    @property
    def error_s(self) -> float:
        """Half-width of the error bar."""
        return BAR_SIGMAS * math.sqrt(self.variance_s2)


def _prefill_features(work: Work) -> tuple[float, float, float, float]:
    return (work.prompts, work.new / 1e4, work.square / 1e8, work.prefix / 1e4)


def _decode_features(batch: float, kv_tokens: float) -> tuple[float, float, float]:
    return (1.0, max(0.0, batch - 1.0), kv_tokens / 1e5)


def _linear_features(tokens: float) -> tuple[float, float]:
    return (1.0, tokens / 1e4)


class _FitPerInstance:
    """One kind of curve: an instance's own, or the pooled one."""

    def __init__(self, shape: tuple[float, ...]) -> None:
        self._shape = shape
        self._pooled = OnlineFit(shape, level=_FRESH_LEVEL, forgetting=0.995)
        self._own: dict[InstanceId, OnlineFit] = {}

    def observe(self, instance_id: InstanceId, x: tuple[float, ...], y: float, now: float) -> None:
        self._pooled.observe(x, y, now)
        own = self._own.get(instance_id)
        if own is None:
            own = self._own[instance_id] = OnlineFit(self._shape, level=_FRESH_LEVEL)
        own.observe(x, y, now)

    def of(self, instance_id: InstanceId, now: float) -> OnlineFit:
        own = self._own.get(instance_id)
        if own is None or own.samples < _OWN_SAMPLES or now - own.last_at_s > _OWN_AGE_S:
            return self._pooled
        return own

    def drop(self, instance_id: InstanceId) -> None:
        self._own.pop(instance_id, None)


class ModelEstimators:
    """All curves of one served model."""

    def __init__(self, *, expected_output_tokens: float = 256.0, coverage: float = 0.95) -> None:
        self._prefill = _FitPerInstance(_PREFILL_SHAPE)
        self._decode = _FitPerInstance(_DECODE_SHAPE)
        self._load = OnlineFit(_LOAD_SHAPE, level=1.0)
        self._hand_over = OnlineFit(_HAND_OVER_SHAPE, level=1.0)
        self.output_tokens = expected_output_tokens
        self.typical_prefill_s = 0.0
        self.ttft_bar = BarScale(coverage)

    # --- learning ---

    def observe_prefill(self, instance_id: InstanceId, sample: PrefillSample, now: float) -> None:
        if sample.prompt_tokens > 0:
            work = prefill_work(sample.prompt_tokens, sample.cached_tokens)
            self._prefill.observe(instance_id, _prefill_features(work), sample.compute_s, now)
            self.typical_prefill_s += 0.05 * (max(0.0, sample.compute_s) - self.typical_prefill_s)

    def observe_decode(self, instance_id: InstanceId, sample: DecodeSample, now: float) -> None:
        if sample.batch > 0:
            self._decode.observe(instance_id, _decode_features(sample.batch, sample.kv_tokens), sample.tbt_s, now)

    def observe_load(self, sample: LoadSample, now: float) -> None:
        self._load.observe(_linear_features(sample.tokens), sample.load_s, now)

    def observe_hand_over(self, prompt_tokens: int, hand_over_s: float, now: float) -> None:
        self._hand_over.observe(_linear_features(prompt_tokens), hand_over_s, now)

    def observe_output(self, output_tokens: int) -> None:
        if output_tokens > 0:
            self.output_tokens += 0.02 * (output_tokens - self.output_tokens)

    def drop_instance(self, instance_id: InstanceId) -> None:
        self._prefill.drop(instance_id)
        self._decode.drop(instance_id)

    # --- estimating ---

    def transfer_s(self, tokens: int) -> float:
        """Loading `tokens` of KVCache from the pool."""
        return self._load.predict(_linear_features(tokens)) if tokens > 0 else 0.0

    def prefill_s(self, instance_id: InstanceId, work: Work, now: float) -> float:
        return self._prefill.of(instance_id, now).predict(_prefill_features(work))

    def queue_s(self, instance_id: InstanceId, queue: PrefillQueue, foreign: int, now: float) -> float:
        """Prefill work on the instance before a new request's turn comes; of `foreign` prompts only the number is
        known.
        """
        active, since_s = queue.in_progress()
        rest = queue.total.minus(active)
        active_s = self.prefill_s(instance_id, active, now) + active.load_us / 1e6
        rest_s = self.prefill_s(instance_id, rest, now) + rest.load_us / 1e6
        return max(0.0, active_s - (now - since_s)) + rest_s + foreign * self.typical_prefill_s

    def hand_over_s(self, prompt_tokens: int) -> float:
        return self._hand_over.predict(_linear_features(prompt_tokens))

    def tbt_s(self, instance_id: InstanceId, batch: int, kv_tokens: int, now: float) -> float:
        return self._decode.of(instance_id, now).predict(_decode_features(batch, kv_tokens))

    def tbt_error_s(self, instance_id: InstanceId, batch: int, kv_tokens: int, now: float) -> float:
        return self._decode.of(instance_id, now).error(_decode_features(batch, kv_tokens))

    def ttft_error_s(
        self, instance_id: InstanceId, ahead: Work, own: Work, load_tokens: int, hand_over_tokens: int, now: float
    ) -> float:
        """Half-width of a TTFT's error bar: noise of every prefill ahead and of this one, doubt about the curve itself
        (the same for all of them, so it does not average out), load, and hand-over; scaled by what bars proved worth.
        """
        fit = self._prefill.of(instance_id, now)
        everything = ahead.plus(own)
        # Prompts differ in size: with a coefficient of variation near 1, sum(T_i^2) is about 2 (sum T_i)^2 / k.
        queue_s = fit.predict(_prefill_features(ahead))
        squares = min(1.0, 2.0 / max(1, ahead.prompts)) * queue_s**2 + fit.predict(_prefill_features(own)) ** 2
        total = TimeEstimate(0.0, fit.sigma**2 * squares + fit.curve_variance(_prefill_features(everything)))
        for part, tokens in ((self._load, load_tokens), (self._hand_over, hand_over_tokens)):
            if tokens > 0:
                total = total.plus(TimeEstimate(0.0, (part.error(_linear_features(tokens)) / BAR_SIGMAS) ** 2))
        return total.error_s * self.ttft_bar.scale

    def drain_s(self, instance_id: InstanceId, batch: int, kv_tokens: int, excess_s: float, now: float) -> float:
        """When so many sequences of a batch have ended that its step is `excess_s` shorter."""
        tbt_s = self.tbt_s(instance_id, batch, kv_tokens, now)
        one_less_s = self.tbt_s(instance_id, batch - 1, kv_tokens * max(0, batch - 1) // max(1, batch), now)
        per_sequence_s = max(tbt_s - one_less_s, 1e-6)
        to_end = min(float(batch), math.ceil(excess_s / per_sequence_s))
        return to_end * self.output_tokens * tbt_s / max(1, batch)


class BarScale:
    """Keeps error bars honest: widened by a miss, narrowed by a hit, so that hits settle at `coverage`.

    Adaptive conformal inference (Gibbs & Candès, 2021) on a multiplicative scale: it covers what no curve models.
    """

    _STEP = 0.15
    _LOWEST, _HIGHEST = 0.1, 20.0

    def __init__(self, coverage: float) -> None:
        self._coverage = coverage
        self.scale = 1.0

    def observe(self, hit: bool) -> None:
        step = -self._STEP * (1 - self._coverage) if hit else self._STEP * self._coverage
        self.scale = min(self._HIGHEST, max(self._LOWEST, self.scale * math.exp(step)))
