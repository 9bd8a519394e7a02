"""Errors of predictions beyond what was measured: sizes out of range, and stand-ins.

A spread is a standard deviation of a time's logarithm. The laws were chosen on 892 curves of
collectives and GEMMs that others measured on GPUs (aiconfigurator's tables). One to five points of
each were kept, and the rest within 64 times their sizes predicted. 91 to 99 % of them lay inside
the 90 % interval, above and below, from one point or several.
"""

import math
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats

MEDIAN_OF_ABSOLUTE_NORMAL = 0.6745
"""The median of |z| of a normal z: turns a median absolute error into a standard deviation."""
INTERVAL_END = 1.645
"""Standard deviations from the middle of a 90 % interval to its ends."""
DRIFT_PER_OCTAVE = 0.1
"""A rate or a start-up time has changed by this spread one octave away. It is a random walk, so
that four octaves away it is twice that. A token bucket alone makes short phases seem 20 %
faster."""
SPREAD_OF_FLIGHT = math.log(2) / INTERVAL_END
"""Spread where one collective alone stands in for several in flight, or the other way around. With
gloo one alone takes up to twice as long."""
SPREAD_PER_OCTAVE_OF_GROUP = 0.3
"""Spread where another group on the same kind of wire stands in. In the same tables it is 0.31 for
groups of twice or half the size, 0.56 for four times."""
SPREAD_OF_WIRE = math.log(2)
"""Spread where a group on another kind of wire stands in, for which no ratio is known."""
SPREAD_OF_FORM = 0.2
"""Spread where another form of a GEMM stands in. It is assumed: forms differ by 4 to 30 % on
CPUs."""
SPREAD_OF_ACTIVATION = math.log(2)
"""Spread where another activation function stands in: relu is a comparison, gelu has an error
function."""
_FARTHEST_OCTAVES = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Spreads of predicted times towards shorter and towards longer times."""

    shorter: Floats
    longer: Floats

    def factor(self, deviates: Floats) -> Floats:
        """Return the factor of the times at so many standard deviations."""
        return np.exp(deviates * np.where(deviates > 0, self.longer, self.shorter))


def above_largest(*, sizes: Floats, seconds: Floats, size: Floats) -> Spread:
    """Return the spread above the largest measured size, where the rate there is held.

    Times never fall as the size grows, and the part that does not grow weighs less and less. The
    time lies between one that keeps the curve's exponent at its end and one in proportion to the
    size, which is the prediction. The former is the end of the 90 % interval. A single point shows
    no exponent: there it is 0, and the time may stay what it is.

    Args:
        sizes, seconds: of each curve's points, the last dimension.
        size: that are asked for, of a shape that broadcasts with (curves, 1).
    """
    exponent = _exponent(sizes[..., -2:], seconds[..., -2:], single=0.0)
    distance = _distance(size / sizes[..., -1:])
    return _spread(shorter=(1 - exponent) * distance, longer=np.zeros(1), distance=distance)


def below_smallest(
    *, sizes: Floats, seconds: Floats, size: Floats, predicted_seconds: Floats
) -> Spread:
    """Return the spread below the smallest measured size, where the time runs to its floor.

    The time lies between one that keeps the curve's exponent at its start and that of the smallest
    size. Both are ends of the 90 % interval. From a single point it may fall in proportion to the
    size.
    """
    exponent = _exponent(sizes[..., :2], seconds[..., :2], single=1.0)
    with np.errstate(divide="ignore"):
        distance = _distance(sizes[..., :1] / size)
        fallen = np.log(seconds[..., :1] / predicted_seconds)
    fallen = np.where(predicted_seconds > 0, fallen, distance)
    shorter = np.maximum(exponent * distance - fallen, 0.0)
    return _spread(shorter=shorter, longer=fallen, distance=distance)


def spread_of_group(wanted: int, near: int) -> float:
    """Return the spread of a group of other size on the same kind of wire."""
    return SPREAD_PER_OCTAVE_OF_GROUP * max(abs(math.log2(wanted / near)), 1.0)


def spread_of_shape(*, typical_error: float, octaves: float) -> float:
    """Return the spread of a GEMM's shape so many octaves outside, in all, a random walk."""
    return min(typical_error / MEDIAN_OF_ABSOLUTE_NORMAL, math.log(2)) * math.sqrt(octaves)


def spread_of_length(work_ratio: float) -> float:
    """Return the spread of attention of another shape with so many times the work."""
    return DRIFT_PER_OCTAVE * math.sqrt(abs(math.log2(work_ratio)))


def _spread(*, shorter: Floats, longer: Floats, distance: Floats) -> Spread:
    """Return the spread of a 90 % interval of logarithms, widened by the drift at a distance."""
    drift = DRIFT_PER_OCTAVE * np.sqrt(distance / math.log(2))
    return Spread(
        shorter=np.hypot(shorter / INTERVAL_END, drift),
        longer=np.hypot(longer / INTERVAL_END, drift),
    )


def _exponent(sizes: Floats, seconds: Floats, *, single: float) -> Floats:
    """Return d log(time) / d log(size) between two points, from 0 to 1."""
    if sizes.shape[-1] == 1:
        return np.full(1, single)
    slopes: Floats = np.diff(np.log(seconds)) / np.diff(np.log(sizes))
    return np.clip(slopes, 0.0, 1.0)


def _distance(ratios: Floats) -> Floats:
    return np.minimum(np.log(ratios), _FARTHEST_OCTAVES * math.log(2))
