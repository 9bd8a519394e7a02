"""Errors of predictions beyond the measurements: sizes out of range, and stand-ins.

A spread is the standard deviation of a time's logarithm. The laws were chosen on 892 published
curves of collectives and GEMMs measured on GPUs (aiconfigurator's tables). One to five points of
each curve were kept, to predict the others within 64 times the kept sizes. The 90 % interval held
91 to 99 % of them, above and below the kept sizes, with one point or several.
"""

import math
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats

MEDIAN_OF_ABSOLUTE_NORMAL = 0.6745
"""The median of |z| for normal z: turns a median absolute error into a standard deviation."""
INTERVAL_END = 1.645
"""Standard deviations from the middle of a 90 % interval to its ends."""
DRIFT_PER_OCTAVE = 0.1
"""Spread by which a rate or a start-up time changes over one octave. It is a random walk, so that
the spread is twice that over four octaves. A token bucket alone makes short phases appear 20 %
faster."""
SPREAD_OF_FLIGHT = math.log(2) / INTERVAL_END
"""Spread if a single collective stands in for several in flight, or the reverse. With gloo a single
collective takes up to twice as long."""
SPREAD_PER_OCTAVE_OF_GROUP = 0.3
"""Spread if another group on the same kind of wire stands in. In the published tables it is 0.31
for groups of twice or half the size, and 0.56 for four times the size."""
SPREAD_OF_WIRE = math.log(2)
"""Spread if a group on another kind of wire stands in; no ratio between wires is known."""
SPREAD_OF_FORM = 0.2
"""Spread if another form of a GEMM stands in. The value is assumed: forms differ by 4 to 30 % on
CPUs."""
SPREAD_OF_ACTIVATION = math.log(2)
"""Spread if another activation function stands in: relu is a comparison, gelu has an error
function."""
_FARTHEST_OCTAVES = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Spreads of a predicted time towards shorter and towards longer times."""

    shorter: Floats
    longer: Floats

    def factor(self, deviates: Floats) -> Floats:
        """Return the factors on the times for the given numbers of standard deviations."""
        return np.exp(deviates * np.where(deviates > 0, self.longer, self.shorter))


def above_largest(*, sizes: Floats, seconds: Floats, size: Floats) -> Spread:
    """Return the spread above the largest measured size, where the prediction keeps the rate.

    Times never fall as the size grows, and their constant part weighs less and less. The prediction
    grows in proportion to the size, which is the upper end. The lower end of the 90 % interval
    keeps the exponent at the curve's end. A single point shows no exponent: there it is 0 (constant
    time).

    Args:
        sizes, seconds: each curve's points in the last dimension.
        size: wanted sizes, of a shape that broadcasts with (curves, 1).
    """
    exponent = _exponent(sizes[..., -2:], seconds[..., -2:], single=0.0)
    distance = _distance(size / sizes[..., -1:])
    return _spread(shorter=(1 - exponent) * distance, longer=np.zeros(1), distance=distance)


def below_smallest(
    *, sizes: Floats, seconds: Floats, size: Floats, predicted_seconds: Floats
) -> Spread:
    """Return the spread below the smallest measured size, where the time runs to its floor.

    The upper end of the 90 % interval is the time at the smallest size. The lower end keeps the
    exponent at the curve's start. With a single point it falls in proportion to the size.
    """
    exponent = _exponent(sizes[..., :2], seconds[..., :2], single=1.0)
    with np.errstate(divide="ignore"):
        distance = _distance(sizes[..., :1] / size)
        fallen = np.log(seconds[..., :1] / predicted_seconds)
    fallen = np.where(predicted_seconds > 0, fallen, distance)
    shorter = np.maximum(exponent * distance - fallen, 0.0)
    return _spread(shorter=shorter, longer=fallen, distance=distance)


def spread_of_group(wanted: int, near: int) -> float:
    """Return the spread of a stand-in group of another size on the same kind of wire."""
    return SPREAD_PER_OCTAVE_OF_GROUP * max(abs(math.log2(wanted / near)), 1.0)


def spread_of_shape(*, typical_error: float, octaves: float) -> float:
    """Return the spread of a GEMM whose shape lies `octaves` outside the measured shapes."""
    return min(typical_error / MEDIAN_OF_ABSOLUTE_NORMAL, math.log(2)) * math.sqrt(octaves)


def spread_of_length(work_ratio: float) -> float:
    """Return the spread of attention that is scaled from another shape by its ratio of work."""
    return DRIFT_PER_OCTAVE * math.sqrt(abs(math.log2(work_ratio)))


def _spread(*, shorter: Floats, longer: Floats, distance: Floats) -> Spread:
    """Return the spread for a 90 % interval of logarithms, widened by the drift over a distance."""
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
