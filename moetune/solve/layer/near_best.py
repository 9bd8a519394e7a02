"""Best degrees where memory is reused.

All degrees are simulated at once, to within rounding; those that may be chosen once more one by
one, with the operations behind them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.estimates import ROUNDING
from moetune.solve.layer.reuse import strategies_that_reuse
from moetune.solve.layer.simulated import simulations
from moetune.solve.layer.times import PhaseTime

_MOST = 1 + 3 * ROUNDING
"""Times a lower bound, at most, a phase takes."""


class EveryDegree:
    """Both phases in every number of chunks that is allowed.

    Attributes:
        is_measured: as of the chooser.
        tokens: on a rank.
        degrees: of each phase, ascending.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """

    def __init__(self, chooser: DegreeChooser, tokens: int) -> None:
        self._chooser = chooser
        self.is_measured = chooser.is_measured
        self.tokens = tokens
        self._times: dict[tuple[Phase, int], PhaseTime] = {}
        self.degrees = [np.array(chooser.allowed(phase, tokens)) for phase in PHASES]
        every = tuple(np.unique(np.concatenate(self.degrees)).tolist())
        self._place = {degree: place for place, degree in enumerate(every)}
        costs, strategies = chooser.costs, strategies_that_reuse(chooser.costs)
        self._simulations = costs.kept(
            ("simulations", tokens, every),
            lambda: simulations(costs=costs, strategies=strategies, tokens=tokens, degrees=every),
        )[chooser.strategy]

    @property
    def least(self) -> list[Floats]:
        """Lower bounds of each phase's seconds, within rounding of them where they are known."""
        places = ([self._place[one] for one in each.tolist()] for each in self.degrees)
        found = self._simulations.seconds
        return [found[at, each] * (1 - ROUNDING) for at, each in enumerate(places)]

    def is_known(self, phase: Phase, degrees: Iterable[int]) -> bool:
        """Return whether the phase is simulated in so many chunks."""
        known = self._simulations.is_known[PHASES.index(phase)]
        return all(known[self._place[one]] for one in degrees)

    def finish(self) -> None:
        """Simulate what is not known."""
        self._simulations.finish()

    def time(self, phase: Phase, degree: int) -> PhaseTime:
        """Return the phase's time in so many chunks."""
        key = phase, degree
        if key not in self._times:
            self._times[key] = self._chooser.time(phase, self.tokens, degree)
        return self._times[key]

    def about(self, phase: Phase) -> dict[int, float]:
        """Return the phase's seconds by degree, within rounding."""
        at = PHASES.index(phase)
        return dict(zip(self.degrees[at].tolist(), self.least[at].tolist(), strict=True))

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
    found, at = EveryDegree(chooser, tokens), PHASES.index(phase)
    found.finish()
    least = found.least[at]
    near = found.degrees[at][least <= least.min() * (1 + NOISE) / (1 - ROUNDING)]
    return {degree: found.time(phase, degree).seconds for degree in near.tolist()}


def fewest_near_best(
    every: EveryDegree, fits: Callable[[Degrees], bool]
) -> tuple[PhaseTime, PhaseTime] | None:
    """Return the fewest chunks of both phases that tie with the best, or are within noise.

    Args:
        fits: tells of the degrees of both phases whether they may be chosen.

    Returns:
        None where nothing fits.
    """
    longer = 1 + (NOISE if every.is_measured else TIE)
    near = _near(every, fits, longer)
    if not all(
        every.is_known(phase, [two[at] for _, two in near]) for at, phase in enumerate(PHASES)
    ):
        every.finish()
        near = _near(every, fits, longer)
    if not near:
        return None
    few = _first_within(every, near, longer)
    forward, backward = map(every.time, PHASES, few)
    return forward, backward


def _near(
    every: EveryDegree, fits: Callable[[Degrees], bool], longer: float
) -> list[tuple[float, Degrees]]:
    """Return the degrees that may take at most so many times as long as the best, it first.

    They stand behind lower bounds of their time, ascending.
    """
    near: list[tuple[float, Degrees]] = []
    for at_least, degrees in every.pairs():
        if near and at_least > near[0][0] * _MOST * longer:
            break
        if fits(degrees):
            near.append((at_least, degrees))
    return near


def _first_within(
    every: EveryDegree, near: Sequence[tuple[float, Degrees]], longer: float
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
            best = min(map(every.seconds, may_be_best))
        if every.seconds(degrees) <= best * longer:
            return degrees
    raise AssertionError("the best is within its own bounds")
