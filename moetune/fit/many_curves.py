"""Times of many curves at the same sizes, all of them at once.

The arithmetic is that of `curve_through`, and tests hold the two together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, array_of, floats_of
from moetune.fit.monotone import end_tangent, never_falling_rows
from moetune.fit.pool import Series

Ints = NDArray[np.int64]

_BENDS = 3
"""Points from which a curve is no straight line."""
_LATEST = 1e300
"""Seconds that pad a curve: so long that no point before them falls."""


class _Points(NamedTuple):
    """The points of each curve; behind the last one sizes are NaN, and times very long.

    Args:
        num: of each curve, shape (curves, 1).
        sizes, seconds: times that never fall, shape (curves, points).
        log_seconds: their logarithms.
    """

    num: Ints
    sizes: Floats
    seconds: Floats
    log_seconds: Floats


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # where another rule holds
def seconds_of_each(curves: Sequence[Series], sizes: Floats, alpha_seconds: float) -> Floats:
    """Return the time of each curve at each of the sizes, shape (curves, sizes).

    Args:
        sizes: positive, shape (sizes,).
        alpha_seconds: start-up time of the fitted line.
    """
    points = _points(curves)
    num_below, last = (points.sizes[:, :, None] < sizes).sum(axis=1), points.num - 1
    low, high = points.sizes[:, :1], _at(points.sizes, last)
    shortest, longest = points.seconds[:, :1], _at(points.seconds, last)
    share, floor = sizes / low, _floors(points, alpha_seconds)
    below = np.clip(floor + (shortest - floor) * share, shortest * share, shortest)
    found = _between(points, np.clip(num_below, 1, np.maximum(last, 1)), sizes)
    found = np.where(num_below == 0, below, found)
    found = np.where(num_below > last, longest * (sizes / high), found)
    at = np.minimum(num_below, last)
    return np.where(_at(points.sizes, at) == sizes, _at(points.seconds, at), found)


def _points(curves: Sequence[Series]) -> _Points:
    num = np.array([[len(one.sizes)] for one in curves])
    sizes = np.full((len(curves), max(_BENDS, int(num.max()))), np.nan)
    seconds = np.full(sizes.shape, _LATEST)
    where = np.arange(sizes.shape[1]) < num
    sizes[where] = [size for one in curves for size in one.sizes]
    seconds[where] = [each for one in curves for each in one.medians]
    times, logs = never_falling_rows(seconds)
    return _Points(num, sizes, times, logs)


def _floors(points: _Points, alpha_seconds: float) -> Floats:
    """Return each curve's seconds at size 0, as `curve_through` has them, shape (curves, 1)."""
    (low, next_one), (first, second) = points.sizes[:, :2].T, points.seconds[:, :2].T
    intercepts = first - (second - first) / (next_one - low) * low
    floors = np.minimum(first, np.maximum(intercepts, alpha_seconds))
    return np.where(points.num == 1, points.seconds[:, :1], floors[:, None])


def _between(points: _Points, at: Ints, sizes: Floats) -> Floats:
    """Return the times on the pieces that end at these points, on the line of two."""
    x, y = np.log(points.sizes), points.log_seconds
    steps = np.diff(x)
    slopes = np.diff(y) / steps
    tangents = _tangents(steps, slopes, points.num)
    step, slope = _at(steps, at - 1), _at(slopes, at - 1)
    left, right = _at(tangents, at - 1), _at(tangents, at)
    second, third = (3 * slope - 2 * left - right) / step, (left + right - 2 * slope) / step**2
    along = np.log(sizes) - _at(x, at - 1)
    bent = np.exp(_at(y, at - 1) + along * (left + along * (second + along * third)))
    low, high = points.sizes[:, :1], points.sizes[:, 1:2]
    shortest, longest = points.seconds[:, :1], points.seconds[:, 1:2]
    straight = shortest + (longest - shortest) / (high - low) * (sizes - low)
    return np.where(points.num < _BENDS, straight, bent)


def _tangents(steps: Floats, slopes: Floats, num: Ints) -> Floats:
    """Return the slope at each point, `monotone.tangents_of`."""
    before, after = slopes[:, :-1], slopes[:, 1:]
    left, right = 2 * steps[:, 1:] + steps[:, :-1], steps[:, 1:] + 2 * steps[:, :-1]
    means = (left + right) / (left / before + right / after)
    found = np.empty((len(steps), steps.shape[1] + 1))
    found[:, 1:-1] = np.where(np.minimum(before, after) > 0, means, 0.0)
    found[:, :1] = _end(steps[:, :1], steps[:, 1:2], slopes[:, :1], slopes[:, 1:2])
    places = [np.maximum(num - one, 0) for one in (2, 3)]
    last = _end(*(_at(one, at) for one in (steps, slopes) for at in places))
    np.put_along_axis(found, num - 1, last, axis=1)
    return found


def _end(*numbers: Floats) -> Floats:
    return floats_of(end_tangent(*map(array_of, numbers)))


def _at(values: Floats, places: Ints) -> Floats:
    """Return each curve's own values at its places."""
    return np.take_along_axis(values, places, axis=1)
