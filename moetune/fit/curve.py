"""Prediction over one size: monotone between measured points, or a published α–β line.

A curve, or a line, is one or many of the same operation: the nominal one, or one for each random
draw. Times are arrays of shape (curves, sizes).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats
from moetune.domain.costs import Estimate, LinearCost, Trust
from moetune.fit.extrapolation import above_largest, below_smallest
from moetune.fit.monotone import never_falling, pieces_through

# Of a published line: the largest median error that the quality gate calls "good".
ASSUMED_RELATIVE_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Times that never fall as the size grows, a monotone cubic between points in log-log.

    Between two points alone it is a start-up time and a rate, the straight line through both.
    Below the smallest size the time runs straight to `floor_seconds` at size 0; above the
    largest it grows by `growth_seconds` for each size, or where nobody knows it the rate is held.

    Args:
        sizes: of the points, ascending, shape (1 or curves, points).
        seconds: of the points, shape (curves, points).
        pieces: as of `monotone.pieces_through`, over log(size); None of less than three points.
        floor_seconds: shape (curves, 1).
        relative_error: the typical error of a prediction between the points, for draws.
        least_seconds_per_size: no time between the points is below this rate's, shape (1 or
            curves, 1).
        growth_seconds: above the largest size, of that shape; None for its rate.
        deviates: of random draws: by how many standard deviations each lies away from the curve,
            below the smallest size and above the largest, shape (2, curves, 1); None of no draws.
    """

    sizes: Floats
    seconds: Floats
    pieces: Floats | None
    floor_seconds: Floats
    relative_error: float
    least_seconds_per_size: Floats
    growth_seconds: Floats | None = None
    deviates: Floats | None = None

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes of at least 0, which need not be whole numbers.

        Args:
            sizes: shape (sizes,), or (curves, sizes) for others of each curve.

        Returns:
            Shape (curves, sizes).
        """
        asked = np.atleast_2d(sizes)
        seconds = self._between(asked)
        above, below = asked > self.sizes[:, -1:], asked < self.sizes[:, :1]
        if above.any():
            seconds = np.where(above, self._above(asked), seconds)
        if below.any():
            seconds = np.where(below, self._below(asked), seconds)
        return seconds

    def predict(self, size: float) -> Estimate:
        """Return the time of a single curve at one size."""
        return Estimate(
            seconds=float(self.seconds_at(np.array([size]))[0, 0]), trust=self.trust(size)
        )

    def trust(self, size: float) -> Trust:
        """Return the trust in the time at a size."""
        points = self.sizes[0]
        if not points[0] <= size <= points[-1]:
            return "extrapolated"
        return "measured" if size in points else "interpolated"

    def _between(self, asked: Floats) -> Floats:
        """Return the times at sizes among the points; elsewhere those of the nearest point."""
        points, last = self.sizes, self.sizes.shape[1] - 1
        inside = np.clip(asked, points[:, :1], points[:, -1:])
        right = (points[:, :, None] < inside[:, None, :]).sum(axis=1)
        left = np.clip(right - 1, 0, max(last - 1, 0))
        if self.pieces is not None:
            start, first, second, third = _taken(self.pieces, left)
            # As the pieces have it: sizes may be so near that the quotient rounds in other ways.
            step = np.log(inside) - _taken(np.log(points), left)
            seconds = np.exp(start + step * (first + step * (second + step * third)))
        elif last:
            rate = np.diff(self.seconds) / np.diff(points)
            seconds = self.seconds[:, :1] + rate * (inside - points[:, :1])
        else:
            return np.broadcast_to(
                self.seconds, np.broadcast_shapes(self.seconds.shape, asked.shape)
            )
        seconds = np.maximum(seconds, inside * self.least_seconds_per_size)
        is_point = _taken(points, right) == inside
        return (
            np.where(is_point, _taken(self.seconds, right), seconds) if is_point.any() else seconds
        )

    def _above(self, asked: Floats) -> Floats:
        last, longest = self.sizes[:, -1:], self.seconds[:, -1:]
        seconds = longest * (asked / last)
        if self.growth_seconds is not None:
            seconds = longest + self.growth_seconds * (asked - last)
        if self.deviates is not None:
            outside = np.maximum(asked, last)
            spread = above_largest(sizes=self.sizes, seconds=self.seconds, size=outside)
            seconds = seconds * spread.factor(self.deviates[1])
        return np.maximum(seconds, longest)

    def _below(self, asked: Floats) -> Floats:
        share, first = asked / self.sizes[:, :1], self.seconds[:, :1]
        seconds = self.floor_seconds + (first - self.floor_seconds) * share
        if self.deviates is not None:
            spread = below_smallest(
                sizes=self.sizes, seconds=self.seconds,
                size=np.minimum(asked, self.sizes[:, :1]),
                predicted_seconds=np.minimum(seconds, first),
            )  # fmt: skip
            seconds = seconds * spread.factor(self.deviates[0])
        return np.minimum(np.maximum(seconds, first * share), first)

    def scaled(self, factors: Floats, deviates: Floats | None = None) -> "Curve":
        """Return the curve with all times multiplied, once for each of the factors.

        Args:
            factors: shape (curves, 1).
            deviates: of the curves.
        """
        pieces = self.pieces
        if pieces is not None:
            rest = np.broadcast_to(pieces[1:], (3, len(factors), pieces.shape[2]))
            pieces = np.concatenate([(pieces[0] + np.log(factors))[None], rest])
        return replace(
            self,
            seconds=self.seconds * factors,
            pieces=pieces,
            floor_seconds=self.floor_seconds * factors,
            least_seconds_per_size=self.least_seconds_per_size * factors,
            growth_seconds=None if self.growth_seconds is None else self.growth_seconds * factors,
            deviates=deviates,
        )


def _taken(values: Floats, places: NDArray[np.int64]) -> Floats:
    """Return the values at some places of each curve, whose points are the last dimension."""
    if len(places) == 1:
        return values[..., places[0]]
    shape = (*values.shape[:-2], len(places))
    return np.take_along_axis(
        np.broadcast_to(values, (*shape, values.shape[-1])),
        np.broadcast_to(places, (*shape, places.shape[-1])),
        axis=-1,
    )


_NOMINAL = np.ones((1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An α–β line with no points to check it against: every prediction is "modelled".

    Args:
        label: of its operation, the same in every run: it seeds random draws.
        alpha_factors, beta_factors: of random draws, shape (draws, 1).
    """

    cost: LinearCost
    label: str = ""
    relative_error: float = ASSUMED_RELATIVE_ERROR
    alpha_factors: Floats = field(default_factory=lambda: _NOMINAL, compare=False)
    beta_factors: Floats = field(default_factory=lambda: _NOMINAL, compare=False)

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes of at least 0, shape (draws, sizes)."""
        alphas = self.alpha_factors * self.cost.alpha_seconds
        return alphas + self.beta_factors * self.cost.beta_seconds * np.atleast_2d(sizes)

    def trust(self, size: float) -> Trust:  # noqa: ARG002 - the same of all
        """Return "modelled"."""
        return "modelled"


def curve_through(
    *,
    sizes: Sequence[float] | Floats,
    seconds: Sequence[float] | Floats,
    alpha_seconds: float | Floats = 0.0,
    relative_error: float = ASSUMED_RELATIVE_ERROR,
    least_seconds_per_size: float = 0.0,
    growth_seconds: float | None = None,
    deviates: Floats | None = None,
) -> Curve:
    """Return the curve through the points, or one through each row of them.

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
        sizes: at least one, positive, distinct and ascending; of all curves, or a row for each.
        seconds: positive, one for each size; a row for each curve.
        alpha_seconds: start-up time of the fitted line; of many curves, shape (curves, 1).
        least_seconds_per_size: no time between the points is below this rate's.
        growth_seconds: for each size above the largest; by default its rate is held.
        deviates: as of `Curve`.
    """
    points = np.atleast_2d(np.asarray(sizes, float))
    monotone, logs = never_falling(np.atleast_2d(np.asarray(seconds, float)))
    has_bends = points.shape[1] > 2  # noqa: PLR2004 - a line has two ends
    return Curve(
        sizes=points,
        seconds=monotone,
        pieces=pieces_through(np.log(points), logs) if has_bends else None,
        floor_seconds=_floors(points, monotone, alpha_seconds),
        relative_error=relative_error,
        least_seconds_per_size=np.full((1, 1), least_seconds_per_size),
        growth_seconds=None if growth_seconds is None else np.full((1, 1), growth_seconds),
        deviates=deviates,
    )


def _floors(sizes: Floats, seconds: Floats, alpha_seconds: float | Floats) -> Floats:
    first = seconds[:, :1]
    if sizes.shape[1] == 1:
        return first
    slopes = (seconds[:, 1:2] - first) / (sizes[:, 1:2] - sizes[:, :1])
    intercepts = first - slopes * sizes[:, :1]
    return np.minimum(first, np.maximum(intercepts, alpha_seconds))
