"""Prediction over one size: monotone between measured points, or a published α–β line."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moetune.domain.arrays import Floats, array_of, exp_of, floats_of, is_many, log_of
from moetune.domain.costs import Estimate, LinearCost
from moetune.fit.extrapolation import above_largest, below_smallest
from moetune.fit.monotone import (
    Piece,
    never_falling,
    on_piece,
    pieces_through,
    straight_between,
)

# Of a published line: the largest median error that the quality gate calls "good".
ASSUMED_RELATIVE_ERROR = 0.05


_FEW = 16
"""Sizes up to which each by itself is sooner than all of an array."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Times that never fall as the size grows, a monotone cubic between points in log-log.

    Between two points alone it is a start-up time and a rate, the straight line through both.
    Below the smallest size the time runs straight to `floor_seconds` at size 0; above the
    largest it grows by `growth_seconds` for each size, or where nobody knows it the rate is held.

    Args:
        sizes, seconds: the points, ascending.
        pieces: from each point to the next, the logarithms of its size and time, and the
            polynomial's coefficients of first to third degree in log(size) from there; none
            of two points.
        relative_error: the typical error of a prediction between the points, for draws.
        growth_seconds: above the largest size; None for its rate.
        deviates: of a random draw: by how many standard deviations it lies beside the curve,
            below the smallest size and above the largest.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    pieces: tuple[Piece, ...]
    floor_seconds: float
    relative_error: float
    least_seconds_per_size: float = 0.0
    growth_seconds: float | None = None
    deviates: tuple[float, float] = (0.0, 0.0)

    def predict(self, size: float) -> Estimate:
        """Return the time at a size of at least 0, which need not be a whole number.

        Of an array of sizes, an array of times.
        """
        if is_many(size):
            many = floats_of(size)
            found = self._each(many) if many.size <= _FEW else self._many(many)
            return Estimate(seconds=array_of(found), trust="measured")
        sizes = self.sizes
        at = bisect_left(sizes, size)
        if at == len(sizes):
            return self._above(size)
        if sizes[at] == size:
            return Estimate(seconds=self.seconds[at], trust="measured")
        if at == 0:
            return self._below(size)
        if self._is_line:
            between = straight_between(self.sizes, self.seconds, size)
        else:
            between = on_piece(self.pieces[at - 1], size)
        seconds = max(between, size * self.least_seconds_per_size)
        return Estimate(seconds=seconds, trust="interpolated")

    @property
    def _is_line(self) -> bool:
        return not self.pieces

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        """Sizes, seconds and the numbers of the pieces, of shape (5, pieces)."""
        return np.array(self.sizes), np.array(self.seconds), np.array(self.pieces).T

    def _each(self, sizes: Floats) -> Floats:
        found = [self.predict(one).seconds for one in sizes.ravel().tolist()]
        return np.array(found).reshape(sizes.shape)

    def _many(self, sizes: Floats) -> Floats:
        """Return the times at an array of sizes; beyond the points a draw's one by one."""
        above, below = sizes > self.sizes[-1], sizes <= self.sizes[0]
        seconds = np.empty(sizes.shape)
        for where, times in (
            (above, self._all_above),
            (below, self._all_below),
            (~(above | below), self._all_between),
        ):
            if where.all():
                return times(sizes)
            if where.any():
                seconds[where] = times(sizes[where])
        return seconds

    def _all_between(self, sizes: Floats) -> Floats:
        known, times, pieces = self._arrays
        at = known.searchsorted(sizes)
        if self._is_line:
            found = straight_between(self.sizes, self.seconds, sizes)
        else:
            found = _on_pieces(pieces[:, at - 1], sizes)
        found = np.maximum(found, sizes * self.least_seconds_per_size)
        return np.where(known[at] == sizes, times[at], found)

    def _all_above(self, sizes: Floats) -> Floats:
        if self.deviates[1]:
            return self._each(sizes)
        if self.growth_seconds is None:
            return self.seconds[-1] * (sizes / self.sizes[-1])
        return self.seconds[-1] + self.growth_seconds * (sizes - self.sizes[-1])

    def _all_below(self, sizes: Floats) -> Floats:
        if self.deviates[0]:
            return self._each(sizes)
        share, first = sizes / self.sizes[0], self.seconds[0]
        fallen = self.floor_seconds + (first - self.floor_seconds) * share
        return np.clip(fallen, first * share, first)

    def _above(self, size: float) -> Estimate:
        seconds = self.seconds[-1] * (size / self.sizes[-1])
        if self.growth_seconds is not None:
            seconds = self.seconds[-1] + self.growth_seconds * (size - self.sizes[-1])
        if self.deviates[1]:
            spread = above_largest(sizes=self.sizes, seconds=self.seconds, size=size)
            seconds *= spread.factor(self.deviates[1])
        return Estimate(seconds=max(seconds, self.seconds[-1]), trust="extrapolated")

    def _below(self, size: float) -> Estimate:
        share, first = size / self.sizes[0], self.seconds[0]
        seconds = self.floor_seconds + (first - self.floor_seconds) * share
        if self.deviates[0]:
            spread = below_smallest(
                sizes=self.sizes, seconds=self.seconds, size=size, predicted_seconds=seconds
            )
            seconds *= spread.factor(self.deviates[0])
        return Estimate(seconds=min(max(seconds, first * share), first), trust="extrapolated")

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with all times multiplied."""
        shift = math.log(factor)
        return replace(
            self,
            seconds=tuple(one * factor for one in self.seconds),
            pieces=tuple(
                (at, value + shift, first, second, third)
                for at, value, first, second, third in self.pieces
            ),
            floor_seconds=self.floor_seconds * factor,
            least_seconds_per_size=self.least_seconds_per_size * factor,
            growth_seconds=None if self.growth_seconds is None else self.growth_seconds * factor,
        )


def _on_pieces(pieces: Floats, sizes: Floats) -> Floats:
    log_size, log_seconds, first, second, third = pieces
    step = log_of(sizes) - log_size
    return exp_of(log_seconds + step * (first + step * (second + step * third)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An α–β line with no points to check it against: every prediction is "modelled"."""

    cost: LinearCost
    relative_error: float = ASSUMED_RELATIVE_ERROR

    def predict(self, size: float) -> Estimate:
        """Return the time at a size of at least 0."""
        return Estimate(seconds=self.cost.seconds(size), trust="modelled")


def curve_through(
    *,
    sizes: Sequence[float],
    seconds: Sequence[float],
    alpha_seconds: float = 0.0,
    relative_error: float = ASSUMED_RELATIVE_ERROR,
    least_seconds_per_size: float = 0.0,
    growth_seconds: float | None = None,
    deviates: tuple[float, float] = (0.0, 0.0),
) -> Curve:
    """Return the curve through the points.

    A cubic, because coarse sizes are common: straight lines in log-log overrate a start-up
    time plus a rate by up to 25 % between sizes 16 times apart, the cubic by 7 %. Two points have
    no bend to show, and make a straight line in size and time.
    Where the times fall as the size grows they are replaced by their isotonic regression
    (in log time), so only points that contradict each other move.

    The floor is the time at size 0 of the straight line through the two smallest points, at
    least `alpha_seconds` and at most the smallest point's time. A single point does not tell a
    start-up time from a rate: its time is held below it and its rate above it, the slowest α–β
    line through it on either side, so that no plan cuts work up for a gain nobody measured.

    Args:
        sizes: at least one, positive, distinct and ascending.
        seconds: positive, one for each size.
        alpha_seconds: start-up time of the fitted line.
        least_seconds_per_size: no time between the points is below this rate's.
        growth_seconds: for each size above the largest; by default its rate is held.
    """
    monotone, log_seconds = never_falling(seconds)
    pieces: tuple[Piece, ...] = ()
    if len(sizes) > 2:  # noqa: PLR2004 - a line has two ends
        pieces = pieces_through([math.log(size) for size in sizes], log_seconds)
    return Curve(
        sizes=tuple(float(size) for size in sizes),
        seconds=monotone,
        pieces=pieces,
        floor_seconds=_floor(sizes, monotone, alpha_seconds),
        relative_error=relative_error,
        least_seconds_per_size=least_seconds_per_size,
        growth_seconds=growth_seconds,
        deviates=deviates,
    )


def _floor(sizes: Sequence[float], seconds: Sequence[float], alpha_seconds: float) -> float:
    if len(sizes) == 1:
        return seconds[0]
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    intercept = seconds[0] - slope * sizes[0]
    return min(seconds[0], max(intercept, alpha_seconds))
