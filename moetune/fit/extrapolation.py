"""Errors of predictions beyond what was measured: sizes out of range, and stand-ins.

A spread is a standard deviation of a time's logarithm. The laws were chosen on 892 curves of
collectives and GEMMs that others measured on GPUs (aiconfigurator's tables). One to five points of
each were kept, and the rest within 64 times their sizes predicted: 91 to 99 % of them lay inside
the 90 % interval, above and below, from one point or several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEDIAN_OF_ABSOLUTE_NORMAL = 0.6745
"""The median of |z| of a normal z: turns a median absolute error into a standard deviation."""
INTERVAL_END = 1.645
"""Standard deviations from the middle of a 90 % interval to its ends."""
DRIFT_PER_OCTAVE = 0.1
"""By which a rate or a start-up time has changed one octave away; a random walk, so that four
octaves away it is twice that. A token bucket alone makes short phases seem 20 % faster."""
SPREAD_OF_FLIGHT = math.log(2) / INTERVAL_END
"""Of one collective alone that stands in for several in flight, or the other way around: with gloo
one alone takes up to twice as long."""
SPREAD_PER_OCTAVE_OF_GROUP = 0.3
"""Of another group on the same kind of wire, of the same tables: 0.31 for groups of twice or half
the size, 0.56 for four times."""
SPREAD_OF_WIRE = math.log(2)
"""Of a group on another kind of wire, for which no ratio is known."""
SPREAD_OF_FORM = 0.2
"""Of another form of a GEMM. Assumed: forms differ by 4 to 30 % on CPUs."""
SPREAD_OF_ACTIVATION = math.log(2)
"""Of another activation function: relu is a comparison, gelu has an error function."""
_FARTHEST_OCTAVES = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Spreads of a predicted time towards shorter and towards longer times."""

    shorter: float
    longer: float

    def factor(self, deviate: float) -> float:
        """Return the factor of the time at so many standard deviations."""
        return math.exp(deviate * (self.longer if deviate > 0 else self.shorter))


def above_largest(*, sizes: Sequence[float], seconds: Sequence[float], size: float) -> Spread:
    """Return the spread above the largest measured size, where the rate there is held.

    Times never fall as the size grows, and the part that does not grow weighs less and less: the
    time lies between one that keeps the curve's exponent at its end and one in proportion to
    the size, which is the prediction. The former is the end of the 90 % interval. A single point
    shows no exponent: there it is 0, and the time may stay what it is.
    """
    exponent = _exponent(sizes[-2:], seconds[-2:], single=0.0)
    distance = _distance(size / sizes[-1])
    return _spread(shorter=(1 - exponent) * distance, longer=0.0, distance=distance)


def below_smallest(
    *,
    sizes: Sequence[float],
    seconds: Sequence[float],
    size: float,
    predicted_seconds: float,
) -> Spread:
    """Return the spread below the smallest measured size, where the time runs to its floor.

    The time lies between one that keeps the curve's exponent at its start and that of the
    smallest size; both are ends of the 90 % interval. From a single point it may fall in
    proportion to the size.
    """
    exponent = _exponent(sizes[:2], seconds[:2], single=1.0)
    distance = _distance(sizes[0] / size) if size else _FARTHEST_OCTAVES * math.log(2)
    fallen = math.log(seconds[0] / predicted_seconds) if predicted_seconds else distance
    return _spread(shorter=max(exponent * distance - fallen, 0.0), longer=fallen, distance=distance)


def spread_of_group(wanted: int, known: int) -> float:
    """Return the spread of a group of other size on the same kind of wire."""
    return SPREAD_PER_OCTAVE_OF_GROUP * max(abs(math.log2(wanted / known)), 1.0)


def spread_of_shape(*, typical_error: float, octaves: float) -> float:
    """Return the spread of a GEMM's shape so far outside the measured ones, a random walk.

    Args:
        typical_error: of a shape inside that was not measured.
        octaves: summed over the shape's sizes.
    """
    return min(typical_error / MEDIAN_OF_ABSOLUTE_NORMAL, math.log(2)) * math.sqrt(octaves)


def spread_of_length(work_ratio: float) -> float:
    """Return the spread of attention of another shape with so many times the work."""
    return DRIFT_PER_OCTAVE * math.sqrt(abs(math.log2(work_ratio)))


def _spread(*, shorter: float, longer: float, distance: float) -> Spread:
    """Return the spread with its 90 % interval's ends so far away, and the drift besides.

    Args:
        distance: from the measured sizes, as a logarithm.
    """
    drift = DRIFT_PER_OCTAVE * math.sqrt(distance / math.log(2))
    return Spread(
        shorter=math.hypot(shorter / INTERVAL_END, drift),
        longer=math.hypot(longer / INTERVAL_END, drift),
    )


def _exponent(sizes: Sequence[float], seconds: Sequence[float], *, single: float) -> float:
    """Return d log(time) / d log(size) between two points, from 0 to 1."""
    if len(sizes) == 1:
        return single
    slope = math.log(seconds[1] / seconds[0]) / math.log(sizes[1] / sizes[0])
    return min(max(slope, 0.0), 1.0)


def _distance(ratio: float) -> float:
    return min(math.log(ratio), _FARTHEST_OCTAVES * math.log(2))
