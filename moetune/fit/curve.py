"""Prediction over one size: monotone between measured points, a line where there are none."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.costs import Estimate, LinearCost

# What a published line is trusted with: the largest median error of the gate's "good".
ASSUMED_RELATIVE_ERROR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Times that never fall as the size grows, straight between points in log-log.

    Below the smallest size the time runs straight to `floor_seconds` at size 0; above the
    largest the rate is held.

    Args:
        sizes, seconds: the points, ascending.
        log_sizes, log_seconds: their logarithms.
        slopes: d log(seconds) / d log(size) from each point to the next.
        relative_error: the typical error of a prediction.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    log_sizes: tuple[float, ...]
    log_seconds: tuple[float, ...]
    slopes: tuple[float, ...]
    floor_seconds: float
    relative_error: float

    def predict(self, size: float) -> Estimate:
        """Return the time at a size of at least 0, which need not be a whole number."""
        sizes = self.sizes
        at = bisect_left(sizes, size)
        if at == len(sizes):
            seconds = self.seconds[-1] * (size / sizes[-1])
            return Estimate(
                seconds=seconds, trust="extrapolated", relative_error=self.relative_error
            )
        if sizes[at] == size:
            return Estimate(
                seconds=self.seconds[at], trust="measured", relative_error=self.relative_error
            )
        if at == 0:
            share = size / sizes[0]
            seconds = self.floor_seconds + (self.seconds[0] - self.floor_seconds) * share
            return Estimate(
                seconds=seconds, trust="extrapolated", relative_error=self.relative_error
            )
        step = math.log(size) - self.log_sizes[at - 1]
        seconds = math.exp(self.log_seconds[at - 1] + self.slopes[at - 1] * step)
        return Estimate(seconds=seconds, trust="interpolated", relative_error=self.relative_error)

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with all times multiplied."""
        shift = math.log(factor)
        return replace(
            self,
            seconds=tuple(one * factor for one in self.seconds),
            log_seconds=tuple(one + shift for one in self.log_seconds),
            floor_seconds=self.floor_seconds * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An α–β line with no points to check it against: every prediction is "modelled"."""

    cost: LinearCost
    relative_error: float = ASSUMED_RELATIVE_ERROR

    def predict(self, size: float) -> Estimate:
        """Return the time at a size of at least 0."""
        return Estimate(
            seconds=self.cost.seconds(size), trust="modelled", relative_error=self.relative_error
        )


def curve_through(
    *,
    sizes: Sequence[float],
    seconds: Sequence[float],
    alpha_seconds: float = 0.0,
    relative_error: float = ASSUMED_RELATIVE_ERROR,
) -> Curve:
    """Return the curve through the points.

    Where the times fall as the size grows they are replaced by their isotonic regression
    (in log time), so only points that contradict each other move.

    The floor is the time at size 0 of the straight line through the two smallest points, at
    least `alpha_seconds` and at most the smallest point's time. A single point says nothing of
    a start-up time: its time is then held below it and its rate above it, which is the dearest
    α–β line through it on both sides, so that nobody is talked into cutting work up.

    Args:
        sizes: at least one, positive, distinct and ascending.
        seconds: positive, one for each size.
        alpha_seconds: start-up time of the fitted line.
    """
    log_seconds = isotonic([math.log(one) for one in seconds])
    kept = tuple(
        given if fitted == math.log(given) else math.exp(fitted)
        for given, fitted in zip(seconds, log_seconds, strict=True)
    )
    log_sizes = tuple(math.log(size) for size in sizes)
    slopes = tuple(
        (log_seconds[at + 1] - log_seconds[at]) / (log_sizes[at + 1] - log_sizes[at])
        for at in range(len(sizes) - 1)
    )
    return Curve(
        sizes=tuple(float(size) for size in sizes),
        seconds=kept,
        log_sizes=log_sizes,
        log_seconds=tuple(log_seconds),
        slopes=slopes,
        floor_seconds=_floor(sizes, kept, alpha_seconds),
        relative_error=relative_error,
    )


def _floor(sizes: Sequence[float], seconds: Sequence[float], alpha_seconds: float) -> float:
    if len(sizes) == 1:
        return seconds[0]
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    intercept = seconds[0] - slope * sizes[0]
    return min(seconds[0], max(intercept, alpha_seconds))


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to the given ones in least squares.

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


def leave_one_out(
    *, sizes: Sequence[float], seconds: Sequence[float], alpha_seconds: float = 0.0
) -> list[float]:
    """Return |predicted / measured − 1| of each point predicted from the others.

    The two ends are left in, as without them the rest would be extrapolated and the domain
    another one; two points predict each other, a single one has no error to show.
    """
    count = len(sizes)
    left_out = range(1, count - 1) if count > 2 else range(count if count > 1 else 0)  # noqa: PLR2004 - a line has two ends
    errors = []
    for at in left_out:
        rest = curve_through(
            sizes=[*sizes[:at], *sizes[at + 1 :]],
            seconds=[*seconds[:at], *seconds[at + 1 :]],
            alpha_seconds=alpha_seconds,
        )
        errors.append(abs(rest.predict(sizes[at]).seconds / seconds[at] - 1))
    return errors
