"""One to three α–β lines along a curve: a collective changes its protocol with the size."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from moetune.domain.costs import LinearCost
from moetune.fit.line import Floats, solve_lines

_MAX_SEGMENTS = 3
# Two points always lie on a line; the third one tests it.
_LEAST_POINTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Lines side by side.

    Args:
        lines: in order of size.
        breaks: the sizes at which the next line begins, one fewer than lines.
    """

    lines: tuple[LinearCost, ...]
    breaks: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """Return the time on the line that holds at that size."""
        return self.lines[bisect_right(self.breaks, size)].seconds(size)


def fit_segments(*, sizes: Sequence[float], seconds: Sequence[float]) -> Segments:
    """Return the lines that predict left-out points best, the fewest of equally good ones.

    Each number of segments from one to three, with at least three points each, is cut where
    the sum of squared relative errors is least; the mean leave-one-out error chooses among
    them. A line explains a curve and gives closed forms; predictions come from `fit.curve`.

    Args:
        sizes: positive, distinct and ascending.
        seconds: positive, one for each size.
    """
    at, times = np.asarray(sizes, float), np.asarray(seconds, float)
    most = max(1, min(_MAX_SEGMENTS, (len(sizes) - 1) // _LEAST_POINTS))
    if most == 1:
        return _cut(at, times, most)[0]
    errors = [[0.0] * len(sizes) for _ in range(most)]
    for left in range(len(sizes)):
        for count, found in enumerate(_cut(np.delete(at, left), np.delete(times, left), most)):
            errors[count][left] = abs(found.seconds(sizes[left]) / seconds[left] - 1)
    means = [math.fsum(one) for one in errors]
    return _cut(at, times, most)[means.index(min(means))]


def _cut(sizes: Floats, seconds: Floats, most: int) -> list[Segments]:
    """Return the best lines of each number of segments from one to `most`."""
    count = len(sizes)
    spans = [(0, count)] + [
        (low, high)
        for low in range(count)
        for high in range(low + _LEAST_POINTS, count + 1)
        if high - low < count
    ]
    lines, missed = _lines(sizes, seconds, spans)
    found = []
    for segments in range(1, most + 1):
        cuts = [
            list(zip((0, *inner), (*inner, count), strict=True))
            for inner in combinations(range(1, count), segments - 1)
        ]
        possible = [cut for cut in cuts if all(span in lines for span in cut)]
        best = min(possible, key=lambda cut: math.fsum(missed[span] for span in cut))
        breaks = [math.sqrt(sizes[low - 1] * sizes[low]) for low, _ in best[1:]]
        found.append(Segments(lines=tuple(lines[span] for span in best), breaks=tuple(breaks)))
    return found


def _lines(
    sizes: Floats, seconds: Floats, spans: list[tuple[int, int]]
) -> tuple[dict[tuple[int, int], LinearCost], dict[tuple[int, int], float]]:
    """Return the line through each span of points, and the squared relative error it leaves."""
    largest = sizes.max()
    u, v = 1 / seconds, (sizes / largest) / seconds
    index = np.arange(len(sizes))
    lows, highs = np.asarray(spans).T
    inside = ((lows[:, None] <= index) & (index < highs[:, None])).astype(float)
    alphas, betas = solve_lines(
        uu=inside @ (u * u), uv=inside @ (u * v), vv=inside @ (v * v), u=inside @ u, v=inside @ v
    )
    left = (inside * (alphas[:, None] * u + betas[:, None] * v - 1) ** 2).sum(axis=1)
    lines = {
        span: LinearCost(alpha_seconds=float(alpha), beta_seconds=float(beta / largest))
        for span, alpha, beta in zip(spans, alphas, betas, strict=True)
    }
    return lines, dict(zip(spans, left.tolist(), strict=True))
