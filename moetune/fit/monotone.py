"""Monotone interpolation: times that never fall, and the cubics between them in log-log."""

import math
import operator
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from moetune.domain.arrays import Floats, longer

Piece: TypeAlias = tuple[float, float, float, float, float]
"""Logarithms of a size and its time, and the coefficients of first to third degree from there."""


def never_falling(seconds: Sequence[float]) -> tuple[tuple[float, ...], list[float]]:
    """Return the times of a curve at its points, and their logarithms."""
    given = list(map(math.log, seconds))
    fitted = isotonic(given)
    if fitted == given:
        return tuple(seconds), fitted
    times = (
        one if log_seconds == own else math.exp(log_seconds)
        for one, own, log_seconds in zip(seconds, given, fitted, strict=True)
    )
    return tuple(times), fitted


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to the given ones in least squares.

    Source: pool adjacent violators, Barlow et al., 1972.
    """
    rising = sorted(values)
    if rising == [*values]:
        return rising
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


def never_falling_rows(seconds: Floats) -> tuple[Floats, Floats]:
    """Return `never_falling` of many curves, shape (curves, points)."""
    logs = np.log(seconds)
    falls = (np.diff(logs) < 0).any(axis=1)
    if not falls.any():
        return seconds, logs
    fitted = logs.copy()
    fitted[falls] = [isotonic(row) for row in logs[falls].tolist()]
    return np.where(fitted == logs, seconds, np.exp(fitted)), fitted


_Sizes = TypeVar("_Sizes", float, Floats)


def straight_between(sizes: Sequence[float], seconds: Sequence[float], size: _Sizes) -> _Sizes:
    """Return the time on the straight line through two points, of an array of sizes an array."""
    (low, high), (first, last) = sizes, seconds
    return first + (last - first) / (high - low) * (size - low)


def pieces_through(x: Sequence[float], y: Sequence[float]) -> tuple[Piece, ...]:
    """Return the cubics of the monotone Hermite interpolation.

    Source: Fritsch and Butland, SIAM J. Sci. Stat. Comput. 5 (1984).
    """
    steps, slopes = steps_between(x, y)
    tangents = tangents_of(steps, slopes)
    return tuple(map(piece_between, x, y, steps, slopes, tangents, tangents[1:]))


def steps_between(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the distance from each point to the next one, and the slope."""
    steps = list(map(operator.sub, x[1:], x))
    rises = map(operator.sub, y[1:], y)
    return steps, list(map(operator.truediv, rises, steps))


def piece_between(
    x: float, y: float, step: float, slope: float, left: float, right: float
) -> Piece:
    """Return the cubic from a point to the next one, by the tangents at both."""
    return (
        x,
        y,
        left,
        (3 * slope - 2 * left - right) / step,
        (left + right - 2 * slope) / step**2,
    )


def tangents_of(steps: Sequence[float], slopes: Sequence[float]) -> list[float]:
    """Return the slope at each point: a weighted harmonic mean of those on both sides."""
    inner = []
    for at in range(1, len(slopes)):
        before, after = slopes[at - 1], slopes[at]
        if before <= 0 or after <= 0:
            inner.append(0.0)
            continue
        left, right = 2 * steps[at] + steps[at - 1], steps[at] + 2 * steps[at - 1]
        inner.append((left + right) / (left / before + right / after))
    first, last = end_tangent(*steps[:2], *slopes[:2]), end_tangent(*steps[:-3:-1], *slopes[:-3:-1])
    return [first, *inner, last]


def end_tangent(step: float, next_step: float, slope: float, next_slope: float) -> float:
    """Return the slope at an end: of a parabola through three points, but not negative."""
    wanted = ((2 * step + next_step) * slope - step * next_slope) / (step + next_step)
    return longer(wanted, 0.0)


def on_piece(piece: Piece, size: float) -> float:
    """Return the time at a size that lies on a piece."""
    log_size, log_seconds, first, second, third = piece
    step = math.log(size) - log_size
    return math.exp(log_seconds + step * (first + step * (second + step * third)))
