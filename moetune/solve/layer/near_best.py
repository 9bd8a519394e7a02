"""Best degrees where memory is reused.

All degrees are simulated at once, to within rounding; those that may be chosen once more one by
one, with the operations behind them.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.simulated import seconds_by_degree
from moetune.solve.layer.times import PhaseTime

_ROUNDING = 1e-9
"""By more than this share no two simulations of a phase differ."""
_MOST = 1 + 3 * _ROUNDING
"""Times a lower bound, at most, a phase takes."""


class _Simulated:
    """Both phases in every number of chunks that is allowed.

    Attributes:
        degrees: of each phase, ascending.
        least: lower bounds of their seconds, within rounding.
    """

    def __init__(self, chooser: DegreeChooser, tokens: int) -> None:
        self._chooser = chooser
        self._tokens = tokens
        self._times: dict[tuple[Phase, int], PhaseTime] = {}
        self.degrees = [np.array(chooser.allowed(phase, tokens)) for phase in PHASES]
        seconds = seconds_by_degree(
            costs=chooser.costs, strategy=chooser.strategy, tokens=tokens, degrees=self.degrees
        )
        self.least: list[Floats] = [each * (1 - _ROUNDING) for each in seconds]

    def time(self, phase: Phase, degree: int) -> PhaseTime:
        """Return the phase's time in so many chunks."""
        key = phase, degree
        if key not in self._times:
            self._times[key] = self._chooser.time(phase, self._tokens, degree)
        return self._times[key]

    def seconds(self, degrees: Degrees) -> float:
        """Return the time of both phases."""
        forward, backward = map(self.time, PHASES, degrees)
        return forward.seconds + backward.seconds

    def pairs(self) -> Iterator[tuple[float, Degrees]]:
        """Yield degrees of both phases behind the lower bound of their time, ascending."""
        (forward, backward), (first, second) = self.least, self.degrees
        if self._chooser.is_paired:
            _, one, other = np.intersect1d(first, second, return_indices=True)
        else:
            one, other = (each.ravel() for each in np.indices((len(first), len(second))))
        bounds = forward[one] + backward[other]
        for at in np.argsort(bounds, kind="stable").tolist():
            yield float(bounds[at]), (int(first[one[at]]), int(second[other[at]]))


def near_best(chooser: DegreeChooser, phase: Phase, tokens: int) -> dict[int, float]:
    """Return the seconds of all degrees within `NOISE` of the best, and of some others."""
    found, at = _Simulated(chooser, tokens), PHASES.index(phase)
    limit = found.least[at].min() * (1 + NOISE) / (1 - _ROUNDING)
    near = found.degrees[at][found.least[at] <= limit]
    return {degree: found.time(phase, degree).seconds for degree in near.tolist()}


def fewest_near_best(
    chooser: DegreeChooser, tokens: int, fits: Callable[[Degrees], bool]
) -> tuple[PhaseTime, PhaseTime] | None:
    """Return the fewest chunks of both phases that tie with the best, or are within noise.

    Args:
        fits: tells of the degrees of both phases whether they may be chosen.

    Returns:
        None where nothing fits.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    simulated = _Simulated(chooser, tokens)
    longer = 1 + (NOISE if chooser.is_measured else TIE)
    near: list[tuple[float, Degrees]] = []
    for at_least, degrees in simulated.pairs():
        if near and at_least > near[0][0] * _MOST * longer:
            break
        if fits(degrees):
            near.append((at_least, degrees))
    if not near:
        return None
    few = _first_within(simulated, near, longer)
    forward, backward = map(simulated.time, PHASES, few)
    return forward, backward


def _first_within(
    simulated: _Simulated, near: Sequence[tuple[float, Degrees]], longer: float
) -> Degrees:
    """Return the fewest chunks that take at most so many times as long as the best.

    One by one only those are simulated that their bounds do not decide.

    Args:
        near: lower bounds, ascending, and degrees, the best among them.
    """
    least, best = near[0][0], math.inf
    for at_least, degrees in sorted(near, key=lambda one: (sum(one[1]), one[1])):
        if at_least * _MOST <= least * longer:
            return degrees
        if best == math.inf:
            may_be_best = (two for bound, two in near if bound <= least * _MOST)
            best = min(map(simulated.seconds, may_be_best))
        if simulated.seconds(degrees) <= best * longer:
            return degrees
    raise AssertionError("the best is within its own bounds")
