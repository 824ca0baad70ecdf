"""A small linear model that learns while it is used: y = c · x with c >= 0, and how far off it may be.

Least squares on the *relative* error (a 2-s prefill may be off by more milliseconds than a 20-ms one), samples
forgotten exponentially, outliers weighed down (Huber), and a prior that knows only the *shape* of the curve: the first
sample sets its level, the following ones bend it. So one sample of a slow machine is enough to predict sensibly for
other sizes.
Knows: vectors of floats. Does not know: what they stand for (estimators.py), or any clock: callers pass `now`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Matrix = npt.NDArray[np.float64]

_RIDGE = 0.01
"""The prior's weight in samples: each coefficient may be off its scaled shape by about sigma / sqrt(_RIDGE)."""
_SIGMA_PRIOR = 0.3
_SIGMA_MIN = 0.005
_SIGMA_MEMORY = 0.95
_HUBER = 3.0
_KEEP_AT_SURPRISE = 0.9
"""A surprise may be the first of many: the past counts less, so that a machine that changed its speed is followed."""
BAR_SIGMAS = 2.0
"""Half-width of an error bar in standard deviations."""


class OnlineFit:
    """One fitted curve. `shape` is the prior up to a factor; `level` is that factor until the first sample comes."""

    def __init__(self, shape: Sequence[float], *, level: float, forgetting: float = 0.99, floor: float = 1e-5) -> None:
        self._shape: _Matrix = np.asarray(shape, dtype=np.float64)
        self._level = level
        self._forgetting = forgetting
        self._floor = floor
        self._gram: _Matrix = np.zeros((len(shape), len(shape)))
        self._moment: _Matrix = np.zeros(len(shape))
        self._variance = _SIGMA_PRIOR**2
        self._coefficients: list[float] = (self._shape * level).tolist()
        self._covariance: _Matrix = np.diag((self._shape * level) ** 2 / _RIDGE)
        self._stale = False
        self.samples = 0
        self.last_at_s = -math.inf

    def observe(self, x: Sequence[float], y: float, now: float) -> None:
        """Learns one sample. Values that cannot be times (not finite, not positive) are ignored."""
        if not (math.isfinite(y) and y > 0 and all(math.isfinite(v) for v in x)):
            return
        weight, scale = 1.0, y
        if self.samples > len(x):
            scale = max(self.predict(x), self._floor)
            weight = self._judge((y - scale) / scale)
        vector: _Matrix = np.asarray(x, dtype=np.float64) / scale
        keep = self._forgetting if weight == 1.0 else _KEEP_AT_SURPRISE
        self._gram = self._gram * keep + weight * np.outer(vector, vector)
        self._moment = self._moment * keep + weight * (y / scale) * vector
        self.samples += 1
        self.last_at_s = now
        self._stale = True

    def _judge(self, residual: float) -> float:
        """Weight of a sample by its relative residual; the noise level follows, at most threefold a step."""
        sigma = self.sigma
        clipped = min(abs(residual), _HUBER * sigma)
        self._variance = max(_SIGMA_MIN**2, _SIGMA_MEMORY * self._variance + (1 - _SIGMA_MEMORY) * clipped**2)
        return 1.0 if abs(residual) <= _HUBER * sigma else _HUBER * sigma / abs(residual)

    @property
    def sigma(self) -> float:
        """Relative standard deviation of one sample around the curve."""
        return math.sqrt(self._variance)

    @property
    def coefficients(self) -> list[float]:
        self._solve()
        return self._coefficients

    def predict(self, x: Sequence[float]) -> float:
        """The mean at `x`."""
        self._solve()
        return sum(c * v for c, v in zip(self._coefficients, x, strict=True))

    def curve_variance(self, x: Sequence[float]) -> float:
        """Variance of `predict(x)` itself: large where nothing like `x` was seen. In units of y squared."""
        self._solve()
        vector: _Matrix = np.asarray(x, dtype=np.float64)
        return self._variance * float(vector @ self._covariance @ vector)

    def error(self, x: Sequence[float]) -> float:
        """Half-width of the error bar of one new sample at `x`."""
        return BAR_SIGMAS * math.sqrt(self._variance * self.predict(x) ** 2 + self.curve_variance(x))

    def _solve(self) -> None:
        if not self._stale:
            return
        self._stale = False
        factor = self._fitted_level()
        prior = self._shape * factor
        ridge: _Matrix = _RIDGE / np.maximum(prior, 1e-12) ** 2
        matrix: _Matrix = self._gram + np.diag(ridge)
        target: _Matrix = self._moment + ridge * prior
        self._covariance = np.linalg.inv(matrix).astype(np.float64)
        self._coefficients = _solve_non_negative(matrix, target)

    def _fitted_level(self) -> float:
        """The factor on the prior's shape that fits the samples best."""
        spread = float(self._shape @ self._gram @ self._shape)
        if spread <= 0:
            return self._level
        return max(float(self._shape @ self._moment) / spread, 1e-9)


def _solve_non_negative(matrix: _Matrix, target: _Matrix) -> list[float]:
    """Least squares with c >= 0: what would come out negative is held at zero, and the rest solved again."""
    free = list(range(len(target)))
    solution = [0.0] * len(target)
    while free:
        part = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
        negative = [i for i, value in zip(free, part.tolist(), strict=True) if value < 0]
        if not negative:
            for i, value in zip(free, part.tolist(), strict=True):
                solution[i] = value
            break
        free = [i for i in free if i not in negative]
    return solution
