"""Monotone interpolation: times that never fall, and the cubics between them in log-log.

All of it is of many curves at once, a row each.
"""

from collections.abc import Sequence

import numpy as np

from moetune.domain.arrays import Floats


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


def never_falling(seconds: Floats) -> tuple[Floats, Floats]:
    """Return the times of curves at their points, and their logarithms.

    Args:
        seconds: shape (curves, points).
    """
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
        Coefficients of degree 0 to 3 in the distance from each point to the next one, shape
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
    """Return the slope at each point: a weighted harmonic mean of those on both sides."""
    before, after = slopes[:, :-1], slopes[:, 1:]
    left, right = (
        2 * steps[:, 1:] + steps[:, :-1],
        steps[:, 1:] + 2 * steps[:, :-1],
    )
    rises = (before > 0) & (after > 0)
    with np.errstate(divide="ignore"):
        mean = (left + right) / (left / before + right / after)
    ends = [_end_tangent(steps[:, at], slopes[:, at]) for at in ([0, 1], [-1, -2])]
    return np.column_stack([ends[0], np.where(rises, mean, 0.0), ends[1]])


def _end_tangent(steps: Floats, slopes: Floats) -> Floats:
    """Return the slope at an end: of a parabola through three points, but not negative."""
    (step, next_step), (slope, next_slope) = steps.T, slopes.T
    wanted = ((2 * step + next_step) * slope - step * next_slope) / (step + next_step)
    found: Floats = np.maximum(wanted, 0.0)
    return found
