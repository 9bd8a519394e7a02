"""Which point to measure again: the median of a few blocks of a noisy operation says little."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from moetune.domain.samples import Point, Sample

AGAIN_SHARE = 0.5
"""Of the time that all points took, spent on noisy ones where no budget says otherwise."""
_CERTAIN = 0.02
_MAX_VISITS = 5
_MIN_QUARTILE_BLOCKS = 4


def next_noisy(samples: Mapping[Point, Sequence[Sample]]) -> Point | None:
    """Return the least certain of the points with the fewest visits; None where all are sure.

    Visits lie apart in time, so that what disturbs one of them does not disturb them all.

    Args:
        samples: of each point, one a visit.
    """
    doubts = {
        point: doubt
        for point, visits in samples.items()
        if len(visits) < _MAX_VISITS and (doubt := doubt_of(visits)) > _CERTAIN
    }
    return min(doubts, key=lambda point: (len(samples[point]), -doubts[point]), default=None)


def doubt_of(visits: Sequence[Sample]) -> float:
    """Return about the relative standard error of the median; 0 where a visit failed."""
    if any(visit.error for visit in visits):
        return 0.0
    seconds = list(itertools.chain.from_iterable(visit.seconds for visit in visits))
    if len(seconds) < _MIN_QUARTILE_BLOCKS:
        width = max(seconds) - min(seconds)
    else:
        low, _, high = statistics.quantiles(seconds, n=4)
        width = high - low
    return width / statistics.median(seconds) / math.sqrt(len(seconds))
