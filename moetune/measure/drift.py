"""Whether the machine changed while it was measured."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.samples import GemmPoint, Point, Sample

DRIFT = "drift"
_MAX_DRIFT = 0.03
_QUARTILE_VALUES = 2


def mark_drift(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples, those of a session that drifted marked "drift".

    A session measures its first point, a matrix product, again at its end. The machine drifted
    between two samples of a product whose medians differ by more than 3 % and by more than
    their own spread explains. What else is measured again is noisy by itself.
    """
    drifted: set[int] = set()
    first: dict[Point, int] = {}
    for index, sample in enumerate(samples):
        if sample.error or not isinstance(sample.point, GemmPoint):
            continue
        start = first.setdefault(sample.point, index)
        if start < index:
            first[sample.point] = index
            if has_drifted(samples[start], sample):
                drifted.update(range(start, index + 1))
    return tuple(
        replace(sample, marks=(*sample.marks, DRIFT))
        if index in drifted and DRIFT not in sample.marks
        else sample
        for index, sample in enumerate(samples)
    )


def has_drifted(before: Sample, after: Sample) -> bool:
    """Whether two samples of one point differ beyond 3 % and beyond their quartiles."""
    change = abs(after.median_seconds / before.median_seconds - 1)
    (low, high), (next_low, next_high) = _quartiles(before), _quartiles(after)
    return change > _MAX_DRIFT and (low > next_high or next_low > high)


def _quartiles(sample: Sample) -> tuple[float, float]:
    if len(sample.seconds) < _QUARTILE_VALUES:
        return sample.seconds[0], sample.seconds[0]
    low, _, high = statistics.quantiles(sample.seconds, n=4, method="inclusive")
    return low, high
