"""Estimators: which curve is used when, honest bars, and how long a batch takes to shrink."""

from __future__ import annotations

import random

import pytest

from conductor.charges import PrefillQueue, prefill_work
from conductor.estimators import BarScale, ModelEstimators
from conductor.messages import DecodeSample, LoadSample, PrefillSample
from mooncake.common.ids import InstanceId, RequestId

FAST, SLOW, NEW = InstanceId("fast"), InstanceId("slow"), InstanceId("new")


def taught() -> ModelEstimators:
    estimators = ModelEstimators()
    for n in (500, 1000, 2000, 4000) * 10:
        estimators.observe_prefill(FAST, PrefillSample(n, 0, n * 1e-3), 0.0)
        estimators.observe_prefill(SLOW, PrefillSample(n, 0, n * 3e-3), 0.0)
    return estimators


def test_a_fresh_cluster_promises_much() -> None:
    estimators = ModelEstimators()
    assert estimators.prefill_s(NEW, prefill_work(30_000, 0), 0.0) < 1.0
    assert estimators.tbt_s(NEW, 32, 100_000, 0.0) < 0.05


def test_each_instance_has_its_own_curve_and_newcomers_the_pooled_one() -> None:
    estimators, work = taught(), prefill_work(2000, 0)
    assert estimators.prefill_s(FAST, work, 1.0) == pytest.approx(2.0, rel=0.1)
    assert estimators.prefill_s(SLOW, work, 1.0) == pytest.approx(6.0, rel=0.1)
    assert 2.0 < estimators.prefill_s(NEW, work, 1.0) < 6.0


def test_a_curve_without_recent_samples_gives_way_to_the_pooled_one() -> None:
    estimators, work = taught(), prefill_work(2000, 0)
    for n in (500, 1000, 2000, 4000) * 10:
        estimators.observe_prefill(FAST, PrefillSample(n, 0, n * 1e-3), 1000.0)
    assert estimators.prefill_s(SLOW, work, 1000.0) < 5.0


def test_a_restarted_instance_begins_anew() -> None:
    estimators, work = taught(), prefill_work(2000, 0)
    estimators.drop_instance(SLOW)
    assert estimators.prefill_s(SLOW, work, 1.0) == estimators.prefill_s(NEW, work, 1.0)


def test_a_cached_prefix_saves_time_and_the_long_tail_costs_more() -> None:
    estimators, rng = ModelEstimators(), random.Random(1)
    for _ in range(300):
        n = rng.randrange(100, 60_000)
        p = int(n * rng.choice([0, 0, 0.5, 0.9]))
        real_s = 0.05 + 1e-4 * (n - p) + 7e-10 * (n * n - p * p)
        estimators.observe_prefill(FAST, PrefillSample(n, p, real_s * rng.gauss(1, 0.03)), 0.0)
    assert estimators.prefill_s(FAST, prefill_work(50_000, 45_000), 0.0) == pytest.approx(0.05 + 0.5 + 0.3325, rel=0.1)
    assert estimators.prefill_s(FAST, prefill_work(120_000, 0), 0.0) == pytest.approx(0.05 + 12 + 10.08, rel=0.1)


def test_a_queue_is_the_sum_of_its_work_less_what_is_done() -> None:
    estimators, queue = taught(), PrefillQueue()
    for i, n in enumerate((1000, 2000, 3000)):
        queue.add(RequestId(str(i)), prefill_work(n, 0, load_s=0.5), 0.0)
    assert estimators.queue_s(FAST, queue, 0, 0.0) == pytest.approx(6.0 + 1.5, rel=0.05)
    assert estimators.queue_s(FAST, queue, 0, 1.0) == pytest.approx(5.0 + 1.5, rel=0.05)
    assert estimators.queue_s(FAST, queue, 2, 0.0) > 7.5


def test_loads_are_learned() -> None:
    estimators = ModelEstimators()
    for tokens in (1000, 5000, 20_000) * 5:
        estimators.observe_load(LoadSample(tokens, 0.01 + tokens * 1e-5), 0.0)
    assert estimators.transfer_s(10_000) == pytest.approx(0.11, rel=0.1)
    assert estimators.transfer_s(0) == 0.0


def test_a_batch_shrinks_at_its_completion_rate() -> None:
    estimators = ModelEstimators(expected_output_tokens=200)
    for b in (1, 2, 4, 8, 16) * 8:
        estimators.observe_decode(FAST, DecodeSample(b, 0.0, 0.02 + 0.005 * (b - 1)), 0.0)
    # 20 sequences: a step is 115 ms; two have to end for 10 ms less; one ends each 200 * 0.115 / 20 s
    assert estimators.drain_s(FAST, 20, 0, 0.0095, 0.0) == pytest.approx(2 * 1.15, rel=0.1)


def test_bars_settle_at_the_asked_coverage_whatever_the_model_misses() -> None:
    rng, bar, hits = random.Random(3), BarScale(0.95), []
    for _ in range(4000):
        hit = abs(rng.gauss(0, 4.0)) <= bar.scale  # a raw bar of 1 is eight times too narrow
        hits.append(hit)
        bar.observe(hit)
    assert sum(hits[500:]) / len(hits[500:]) == pytest.approx(0.95, abs=0.01)
    assert 5 < bar.scale < 14
