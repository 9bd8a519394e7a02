"""Prediction over size: monotone between measured points, or a published α–β line.

A curve or a line holds one or many versions of an operation: the nominal times, or a version for
each random draw. Times are arrays of shape (curves, sizes). Between measured sizes they follow
cubics in log-log and never fall. A curve's error is its leave-one-out error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats
from moetune.domain.costs import Estimate, LinearCost, Trust
from moetune.fit.extrapolation import above_largest, below_smallest


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to the given values in least squares.

    Source: pool adjacent violators, Barlow et al., 1972.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            total = counts[-1] + count
            means[-1] += (mean - means[-1]) * count / total
            counts[-1] = total
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]


def never_falling(seconds: Floats) -> tuple[Floats, Floats]:
    """Return the curves' times made non-decreasing, and their logarithms, both (curves, points)."""
    logs = np.log(seconds)
    falls = (np.diff(logs) < 0).any(axis=1)
    if not falls.any():
        return seconds, logs
    fitted = logs.copy()
    fitted[falls] = [isotonic(row) for row in logs[falls].tolist()]
    return np.where(fitted == logs, seconds, np.exp(fitted)), fitted


def pieces_through(x: Floats, y: Floats) -> Floats:
    """Return the cubics of the monotone Hermite interpolation.

    Args:
        x: shape (curves or 1, points), at least three points, ascending.
        y: shape (curves, points), never falling.

    Returns:
        Coefficients of degree 0 to 3 in the distance from each point to the next point, shape
        (4, curves, points - 1).

    Source: Fritsch and Butland, SIAM J. Sci. Stat. Comput. 5 (1984).
    """
    steps = np.diff(x)
    slopes = np.diff(y) / steps
    tangents = _tangents(np.broadcast_to(steps, slopes.shape), slopes)
    left, right = tangents[:, :-1], tangents[:, 1:]
    return np.stack([
        y[:, :-1],
        left,
        (3 * slopes - 2 * left - right) / steps,
        (left + right - 2 * slopes) / steps**2,
    ])  # fmt: skip


def _tangents(steps: Floats, slopes: Floats) -> Floats:
    """Return the slope at each point: a weighted harmonic mean of the slopes on both sides."""
    before, after = slopes[:, :-1], slopes[:, 1:]
    left, right = (2 * steps[:, 1:] + steps[:, :-1], steps[:, 1:] + 2 * steps[:, :-1])
    rises = (before > 0) & (after > 0)
    with np.errstate(divide="ignore"):
        mean = (left + right) / (left / before + right / after)
    ends = [_end_tangent(steps[:, places], slopes[:, places]) for places in ([0, 1], [-1, -2])]
    return np.column_stack([ends[0], np.where(rises, mean, 0.0), ends[1]])


def _end_tangent(steps: Floats, slopes: Floats) -> Floats:
    """Return the slope at an end of the parabola through three points, at least 0."""
    (step, next_step), (slope, next_slope) = steps.T, slopes.T
    wanted = ((2 * step + next_step) * slope - step * next_slope) / (step + next_step)
    tangent: Floats = np.maximum(wanted, 0.0)
    return tangent


# A published line is taken to have the largest median error that the quality gate calls "good".
ASSUMED_RELATIVE_ERROR = 0.05


class Times(Protocol):
    """Times of one operation over its size, for one curve or for one curve per random draw."""

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes, shape (curves, sizes)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Times that never fall as the size grows: a monotone cubic between points in log-log.

    With two points the curve is the straight line through them: a start-up time and a rate. Below
    the smallest size the time runs straight to `floor_seconds` at size 0. Above the largest size it
    grows by `growth_seconds` per unit of size; without that it keeps the rate of the last point.

    Args:
        sizes: of the points, ascending, shape (1 or curves, points).
        seconds: of the points, shape (curves, points).
        pieces: cubics of `pieces_through` over log(size); None for fewer than three points.
        floor_seconds: shape (curves, 1).
        relative_error: the typical error of a prediction between the points, for draws.
        least_seconds_per_size: the fastest rate between points, shape (1 or curves, 1).
        growth_seconds: above the largest size, of that shape; None to keep the last rate.
        deviates: standard deviations by which each random draw lies away from the curve, below the
            smallest size and above the largest, shape (2, curves, 1). None without draws.
    """

    sizes: Floats
    seconds: Floats
    pieces: Floats | None
    floor_seconds: Floats
    relative_error: float
    least_seconds_per_size: Floats
    growth_seconds: Floats | None
    deviates: Floats | None

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at non-negative sizes, shape (curves, sizes).

        Args:
            sizes: real numbers of shape (sizes,), or (curves, sizes) to differ by curve.
        """
        asked = np.atleast_2d(sizes)
        seconds = self._interpolate(asked)
        above, below = asked > self.sizes[:, -1:], asked < self.sizes[:, :1]
        if above.any():
            seconds = np.where(above, self._above(asked), seconds)
        if below.any():
            seconds = np.where(below, self._below(asked), seconds)
        return seconds

    def predict(self, size: float) -> Estimate[float]:
        """Return the time of a single curve at one size."""
        seconds = self.seconds_at(np.array([size])).item()
        return Estimate(seconds=seconds, trust=self.trust(size))

    def trust(self, size: float) -> Trust:
        """Return the trust in the time at a size."""
        points = self.sizes[0]
        if not points[0] <= size <= points[-1]:
            return "extrapolated"
        return "measured" if size in points else "interpolated"

    def _interpolate(self, asked: Floats) -> Floats:
        """Return the times at sizes within the points' range; outside it, the nearest time."""
        points, last = self.sizes, self.sizes.shape[1] - 1
        inside = np.clip(asked, points[:, :1], points[:, -1:])
        right = (points[:, :, None] < inside[:, None, :]).sum(axis=1)
        left = np.clip(right - 1, 0, max(last - 1, 0))
        if self.pieces is not None:
            start, first, second, third = _take(self.pieces, left)
            # A difference of logarithms, as in the pieces: log(quotient) may round otherwise.
            step = np.log(inside) - _take(np.log(points), left)
            seconds = np.exp(start + step * (first + step * (second + step * third)))
        elif last:
            rate = np.diff(self.seconds) / np.diff(points)
            seconds = self.seconds[:, :1] + rate * (inside - points[:, :1])
        else:
            return np.broadcast_to(
                self.seconds, np.broadcast_shapes(self.seconds.shape, asked.shape)
            )
        seconds = np.maximum(seconds, inside * self.least_seconds_per_size)
        is_point = _take(points, right) == inside
        return (
            np.where(is_point, _take(self.seconds, right), seconds) if is_point.any() else seconds
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
        """Return the curve with its times multiplied by each factor, shape (curves, 1)."""
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


def _take(values: Floats, places: NDArray[np.int64]) -> Floats:
    """Return each curve's values at the given places; points are the last dimension."""
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
        label: name of its operation, equal in every run; it seeds random draws.
        alpha_factors, beta_factors: of random draws, shape (draws, 1).
    """

    cost: LinearCost
    label: str
    relative_error: float = ASSUMED_RELATIVE_ERROR
    alpha_factors: Floats = field(default_factory=lambda: _NOMINAL, compare=False)
    beta_factors: Floats = field(default_factory=lambda: _NOMINAL, compare=False)

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at non-negative sizes, shape (draws, sizes)."""
        alphas = self.alpha_factors * self.cost.alpha_seconds
        return alphas + self.beta_factors * self.cost.beta_seconds * np.atleast_2d(sizes)


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
    """Return the curve through the points, or one curve through each row of points.

    The curve is a cubic, because measured sizes are often far apart. At sizes 16 times apart,
    straight lines in log-log overestimate α + β·size by up to 25 %, the cubic by 7 %. Two points
    define no bend, and make a straight line in size and time. If times fall as the size grows,
    their isotonic regression (in log time) replaces them; other points stay.

    The floor is the time at size 0 on the straight line through the two smallest points. It is at
    least `alpha_seconds`, and at most the smallest point's time. A single point cannot separate
    start-up from rate. Below it the time is constant, above it the rate is: on either side this is
    the slowest α–β line through it. So no plan cuts work into chunks for an unmeasured gain.

    Args:
        sizes: positive, distinct and ascending, not empty; shared by all curves, or a row for each.
        seconds: positive, one for each size; a row for each curve.
        alpha_seconds: start-up time of the fitted line; for many curves, shape (curves, 1).
        growth_seconds: per unit of size above the largest; by default the last rate is kept.
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


LINE_ERROR = 0.017
"""Error of a straight line between two sizes, for each e-fold between them.

Public curves of collectives and GEMMs, reduced to two sizes 16 times apart, have median errors of
4.3 and 5.9 %. At sizes 4,096 times apart the errors are 10.4 and 14.9 %.
"""
SPACING_SHARE = 0.35
"""Error between measured sizes over the leave-one-out error, whose gap is twice as wide.

Every second size of 194 published collective curves and 638 GEMM curves from GPUs was kept. The
median error between kept sizes was 0.35 and 0.28 of their leave-one-out error.
"""


def interpolation_errors(
    *, sizes: Sequence[float], seconds: Sequence[float], alpha_seconds: float
) -> list[float]:
    """Return errors of the curve around each of its points, from |predicted / measured − 1|.

    Each inner point is predicted from the others; the full curve errs by `SPACING_SHARE` of that.
    The two ends are never left out, because that would be extrapolation. Two points leave nothing
    out: their error is that of a line through two sizes so far apart (`LINE_ERROR`). If the time
    falls as the size grows, the error is half of that fall. A single point has no error.
    """
    if len(sizes) == 2:  # noqa: PLR2004 - a line has two ends
        fall = (seconds[0] / seconds[1] - 1) / 2
        return [fall if fall > 0 else LINE_ERROR * math.log(sizes[1] / sizes[0])]
    errors = left_out_errors(sizes=sizes, seconds=seconds, alpha_seconds=alpha_seconds)
    return [SPACING_SHARE * abs(error) for error in errors.values()]


def left_out_errors(
    *, sizes: Sequence[float], seconds: Sequence[float], alpha_seconds: float
) -> dict[int, float]:
    """Return predicted / measured − 1 of each point that `interpolation_errors` leaves out."""
    count = len(sizes)
    left_out = np.arange(1, count - 1) if count > 2 else np.arange(count if count > 1 else 0)  # noqa: PLR2004 - of a line
    if not left_out.size:
        return {}
    points, times = np.asarray(sizes, float), np.asarray(seconds, float)
    rest = np.array([np.delete(np.arange(count), place) for place in left_out])
    curves = curve_through(sizes=points[rest], seconds=times[rest], alpha_seconds=alpha_seconds)
    predicted = curves.seconds_at(points[left_out][:, None])[:, 0]
    errors = (predicted / times[left_out] - 1).tolist()
    return dict(zip(left_out.tolist(), errors, strict=True))
