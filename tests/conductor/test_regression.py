"""The online fit: learns a curve, forgets an old one, ignores outliers, and knows how wrong it may be."""

from __future__ import annotations

import math
import random

import pytest

from conductor.regression import OnlineFit

TRUTH = (0.0666, 1.1, 0.0738, 0.026)


def features(rng: random.Random) -> tuple[float, ...]:
    n = rng.lognormvariate(9, 1)
    p = n * rng.choice([0, 0, 0.5, 0.9])
    return (1.0, (n - p) / 1e4, (n * n - p * p) / 1e8, p / 1e4)


def cost(x: tuple[float, ...], factor: float = 1.0) -> float:
    return factor * sum(c * v for c, v in zip(TRUTH, x, strict=True))


def trained(rng: random.Random, samples: int = 200, noise: float = 0.05, factor: float = 1.0) -> OnlineFit:
    fit = OnlineFit((0.05, 1.0, 0.1, 0.05), level=0.1)
    for i in range(samples):
        x = features(rng)
        fit.observe(x, cost(x, factor) * rng.gauss(1, noise), float(i))
    return fit


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_learns_a_curve_whatever_the_speed_of_the_machine(factor: float) -> None:
    rng = random.Random(1)
    fit = trained(rng, factor=factor)
    errors = [abs(fit.predict(x) / cost(x, factor) - 1) for x in (features(rng) for _ in range(200))]
    assert sorted(errors)[190] < 0.05


def test_one_sample_sets_the_level_for_all_sizes() -> None:
    fit = OnlineFit(TRUTH, level=0.1)
    x = (1.0, 0.1, 0.01, 0.0)
    fit.observe(x, cost(x, 50), 0.0)
    large = (1.0, 1.0, 1.0, 0.0)
    assert fit.predict(large) == pytest.approx(cost(large, 50), rel=0.05)


def test_error_bars_cover_what_they_say() -> None:
    rng = random.Random(2)
    fit, inside, width = trained(rng), 0, []
    for _ in range(500):
        x = features(rng)
        real = cost(x) * rng.gauss(1, 0.05)
        inside += abs(real - fit.predict(x)) <= fit.error(x)
        width.append(fit.error(x) / fit.predict(x))
    assert inside >= 450  # two sigmas
    assert sorted(width)[250] < 0.2


def test_bars_are_wide_where_nothing_was_seen() -> None:
    fit = OnlineFit((0.05, 1.0, 0.1, 0.05), level=0.1)
    rng = random.Random(3)
    for i in range(100):
        n = rng.uniform(100, 500)
        x = (1.0, n / 1e4, n * n / 1e8, 0.0)
        fit.observe(x, cost(x) * rng.gauss(1, 0.05), float(i))
    near, far = (1.0, 0.03, 0.0009, 0.0), (1.0, 10.0, 100.0, 0.0)
    assert fit.error(far) / fit.predict(far) > 3 * fit.error(near) / fit.predict(near)


def test_follows_a_change_of_level() -> None:
    rng = random.Random(4)
    fit = trained(rng)
    for i in range(300):
        x = features(rng)
        fit.observe(x, cost(x, 3.0) * rng.gauss(1, 0.05), 200.0 + i)
    x = (1.0, 1.0, 1.0, 0.0)
    assert fit.predict(x) == pytest.approx(cost(x, 3.0), rel=0.1)


def test_a_few_wild_samples_change_little() -> None:
    rng = random.Random(5)
    fit = trained(rng)
    x = (1.0, 1.0, 1.0, 0.0)
    before = fit.predict(x)
    for i in range(3):
        fit.observe(x, 50 * cost(x), 300.0 + i)
    assert fit.predict(x) == pytest.approx(before, rel=0.1)


def test_never_negative_and_never_broken_by_nonsense() -> None:
    fit = OnlineFit(TRUTH, level=0.1)
    for y in (math.nan, math.inf, -1.0, 0.0):
        fit.observe((1.0, 1.0, 1.0, 0.0), y, 0.0)
    fit.observe((1.0, math.nan, 1.0, 0.0), 1.0, 0.0)
    assert fit.samples == 0
    rng = random.Random(6)
    for i in range(50):
        fit.observe(features(rng), rng.uniform(0.001, 10), float(i))
    assert all(c >= 0 for c in fit.coefficients)
    assert all(math.isfinite(fit.predict(features(rng))) for _ in range(50))
