"""Curves of many random draws at once: a prediction is an array of seconds, one for each draw.

`curve.Curve` is one draw's; tests hold the two together.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moetune.domain.arrays import Floats, array_of
from moetune.domain.costs import Estimate
from moetune.fit.curve import Curve
from moetune.fit.extrapolation import factors_above, factors_below, slack_above
from moetune.fit.monotone import never_falling_rows


@dataclass(frozen=True, kw_only=True)
class DrawnCurves:
    """Curves through the same sizes, one for each draw.

    Args:
        sizes: ascending.
        seconds: never falling, shape (draws, sizes).
        log_seconds: their logarithms.
        floor_seconds: shape (draws,).
        growth_seconds: as of `Curve`, shape (draws,).
        deviates: as of `Curve`, shape (draws, 2).
    """

    sizes: tuple[float, ...]
    seconds: Floats
    log_seconds: Floats
    floor_seconds: Floats
    least_seconds_per_size: float | Floats
    growth_seconds: Floats | None
    deviates: Floats
    _pieces: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict, init=False)

    def predict(self, size: float) -> Estimate:
        """Return the times at a size of at least 0, which need not be a whole number."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            seconds = self._beyond(size)
        elif self.sizes[at] == size:
            seconds = self.seconds[:, at]
        elif at == 0:
            seconds = self._beyond(size)
        else:
            seconds = np.maximum(self._between(at - 1, size), size * self.least_seconds_per_size)
        return Estimate(seconds=array_of(seconds), trust="measured")

    def _between(self, at: int, size: float) -> Floats:
        if len(self.sizes) == 2:  # noqa: PLR2004 - a line has two ends
            (low, high), (first, last) = self.sizes, self.seconds.T
            straight: Floats = first + (last - first) / (high - low) * (size - low)
            return straight
        first, second, third = self._piece(at)
        step = math.log(size) - math.log(self.sizes[at])
        power = step * (first + step * (second + step * third))
        found: Floats = np.exp(self.log_seconds[:, at] + power)
        return found

    def _piece(self, at: int) -> tuple[Floats, Floats, Floats]:
        """Return the coefficients from a point to the next one."""
        found = self._pieces.get(at)
        if found is None:
            step = math.log(self.sizes[at + 1]) - math.log(self.sizes[at])
            slope = (self.log_seconds[:, at + 1] - self.log_seconds[:, at]) / step
            left, right = self._tangent(at), self._tangent(at + 1)
            second = (3 * slope - 2 * left - right) / step
            found = self._pieces[at] = left, second, (left + right - 2 * slope) / step**2
        return found

    def _tangent(self, at: int) -> Floats:
        """Return the slope at a point, as of `monotone.tangents_of`."""
        logs, num = [math.log(size) for size in self.sizes], len(self.sizes)
        steps = [logs[one + 1] - logs[one] for one in range(num - 1)]

        def slope(one: int) -> Floats:
            rise: Floats = self.log_seconds[:, one + 1] - self.log_seconds[:, one]
            return rise / steps[one]

        if at in {0, num - 1}:
            near, next_one = (0, 1) if at == 0 else (num - 2, num - 3)
            wanted = (2 * steps[near] + steps[next_one]) * slope(near)
            wanted = wanted - steps[near] * slope(next_one)
            ends: Floats = np.maximum(wanted / (steps[near] + steps[next_one]), 0.0)
            return ends
        before, after = slope(at - 1), slope(at)
        left, right = 2 * steps[at] + steps[at - 1], steps[at] + 2 * steps[at - 1]
        grows = (before > 0) & (after > 0)
        mean = left / np.where(grows, before, 1.0) + right / np.where(grows, after, 1.0)
        inner: Floats = np.where(grows, (left + right) / mean, 0.0)
        return inner

    @cached_property
    def _slack(self) -> Floats:
        return slack_above(sizes=self.sizes, seconds=self.seconds, deviates=self.deviates[:, 1])

    def _beyond(self, size: float) -> Floats:
        """Return the times outside the sizes, as of `Curve`."""
        if size > self.sizes[-1]:
            last = self.seconds[:, -1]
            factors = factors_above(
                self._slack, ratio=size / self.sizes[-1], deviates=self.deviates[:, 1]
            )
            risen = last * (size / self.sizes[-1])
            if self.growth_seconds is not None:
                risen = last + self.growth_seconds * (size - self.sizes[-1])
            held: Floats = np.maximum(risen * factors, last)
            return held
        share, first = size / self.sizes[0], self.seconds[:, 0]
        fallen = self.floor_seconds + (first - self.floor_seconds) * share
        factors = factors_below(
            sizes=self.sizes, seconds=self.seconds, size=size, predicted_seconds=fallen,
            deviates=self.deviates[:, 0],
        )  # fmt: skip
        found: Floats = np.clip(fallen * factors, first * share, first)
        return found


def curves_through(
    *,
    sizes: Sequence[float],
    seconds: Floats,
    alpha_seconds: Floats,
    deviates: Floats,
) -> DrawnCurves:
    """Return `curve.curve_through` of each draw.

    Args:
        sizes: at least one, positive, distinct and ascending.
        seconds: positive, shape (draws, sizes).
        alpha_seconds: start-up time of the fitted line, shape (draws,).
        deviates: shape (draws, 2).
    """
    monotone, logs = never_falling_rows(seconds)
    floor_seconds = monotone[:, 0]
    if len(sizes) > 1:
        slope = (monotone[:, 1] - monotone[:, 0]) / (sizes[1] - sizes[0])
        intercept = monotone[:, 0] - slope * sizes[0]
        floor_seconds = np.minimum(monotone[:, 0], np.maximum(intercept, alpha_seconds))
    return DrawnCurves(
        sizes=tuple(map(float, sizes)), seconds=monotone, log_seconds=logs,
        floor_seconds=floor_seconds, least_seconds_per_size=0.0, growth_seconds=None,
        deviates=deviates,
    )  # fmt: skip


def scaled_curves(curve: Curve, factors: Floats, deviates: Floats) -> DrawnCurves:
    """Return the curve with all times multiplied, by one factor for each draw.

    Args:
        factors: shape (draws,).
        deviates: shape (draws, 2).
    """
    seconds = np.array(curve.seconds)
    logs = np.array([math.log(one) for one in curve.seconds])
    return DrawnCurves(
        sizes=curve.sizes,
        seconds=np.outer(factors, seconds),
        log_seconds=np.add.outer(np.log(factors), logs),
        floor_seconds=curve.floor_seconds * factors,
        least_seconds_per_size=curve.least_seconds_per_size * factors,
        growth_seconds=None if curve.growth_seconds is None else curve.growth_seconds * factors,
        deviates=deviates,
    )
