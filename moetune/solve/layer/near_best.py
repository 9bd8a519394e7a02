"""Best degrees where memory is reused.

All degrees are simulated at once.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.reuse import strategies_that_reuse
from moetune.solve.layer.simulated import simulations
from moetune.solve.layer.times import PhaseTime, reused_time


class EveryDegree:
    """Both phases in every number of chunks that is allowed.

    Attributes:
        is_measured: as of the chooser.
        tokens: on a rank.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """

    def __init__(self, chooser: DegreeChooser, tokens: int) -> None:
        self._chooser = chooser
        self.is_measured = chooser.is_measured
        self.tokens = tokens
        self._times: dict[tuple[Phase, int], PhaseTime] = {}
        self._degrees = [chooser.allowed(phase, tokens) for phase in PHASES]
        every = tuple(sorted({*self._degrees[0], *self._degrees[1]}))
        self._place = {degree: place for place, degree in enumerate(every)}
        costs, strategies = chooser.costs, strategies_that_reuse(chooser.costs)
        self._seconds = costs.kept(
            ("simulations", tokens, every),
            lambda: simulations(costs=costs, strategies=strategies, tokens=tokens, degrees=every),
        )[chooser.strategy]

    def time(self, phase: Phase, degree: int) -> PhaseTime:
        """Return the phase's time in so many chunks."""
        key = phase, degree
        if key not in self._times:
            self._times[key] = reused_time(
                costs=self._chooser.costs, phase=phase, tokens=self.tokens, degree=degree,
                strategy=self._chooser.strategy,
                seconds=float(self._seconds[PHASES.index(phase), self._place[degree]]),
            )  # fmt: skip
        return self._times[key]

    def seconds(self, phase: Phase) -> dict[int, float]:
        """Return the phase's seconds by degree."""
        at = PHASES.index(phase)
        found, degrees = self._seconds[at], self._degrees[at]
        return {one: float(found[self._place[one]]) for one in degrees}

    def pairs(self) -> Iterator[tuple[float, Degrees]]:
        """Yield degrees of both phases behind their time, ascending."""
        forward, backward = map(self.seconds, PHASES)
        if self._chooser.is_paired:
            pairs = [(each + backward[one], (one, one)) for one, each in forward.items()]
            yield from sorted(pairs)
            return
        sums = np.add.outer([*forward.values()], [*backward.values()]).ravel()
        first, second = list(forward), list(backward)
        for at in np.argsort(sums, kind="stable").tolist():
            one, other = divmod(at, len(second))
            yield float(sums[at]), (first[one], second[other])


def near_best(chooser: DegreeChooser, phase: Phase, tokens: int) -> dict[int, float]:
    """Return the seconds of all degrees within `NOISE` of the best."""
    seconds = EveryDegree(chooser, tokens).seconds(phase)
    limit = min(seconds.values()) * (1 + NOISE)
    return {degree: each for degree, each in seconds.items() if each <= limit}


def fewest_near_best(
    every: EveryDegree, fits: Callable[[Degrees], bool]
) -> tuple[PhaseTime, PhaseTime] | None:
    """Return the fewest chunks of both phases that tie with the best, or are within noise.

    Args:
        fits: tells of the degrees of both phases whether they may be chosen.

    Returns:
        None where nothing fits.
    """
    near = _near(every, fits)
    if not near:
        return None
    few = min(near, key=lambda degrees: (sum(degrees), degrees))
    forward, backward = map(every.time, PHASES, few)
    return forward, backward


def _near(every: EveryDegree, fits: Callable[[Degrees], bool]) -> list[Degrees]:
    """Return the degrees that fit and are within noise of the best, of measured costs, or tie."""
    longer = 1 + (NOISE if every.is_measured else TIE)
    near: list[Degrees] = []
    limit = math.inf
    for seconds, degrees in every.pairs():
        if seconds > limit:
            break
        if fits(degrees):
            limit = min(limit, seconds * longer)
            near.append(degrees)
    return near
