"""Best degrees where memory is reused: few are simulated, as bounds exclude the others."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from math import isfinite

from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.reuse import link_seconds, lower_bound_seconds
from moetune.solve.layer.times import PhaseTime


class SimulatedDegrees:
    """The allowed degrees of a phase, or of both in as many chunks, simulated when first wanted.

    Most degrees are excluded by what their transfers alone take, so that their lower bounds are
    worked out when they are wanted, too.

    Args:
        phases: one, or both where they are paired.
    """

    def __init__(self, chooser: DegreeChooser, phases: Sequence[Phase], tokens: int) -> None:
        self._chooser = chooser
        self._phases = phases
        self._tokens = tokens
        self._times: dict[int, tuple[PhaseTime, ...]] = {}
        self._seconds: dict[int, float] = {}
        self._allowed = chooser.allowed(phases[0], tokens)
        self._ordered: list[tuple[float, int]] = []
        self._bounds: dict[int, float] = {}

    @cached_property
    def _waiting(self) -> list[tuple[float, int]]:
        """Degrees that are not in order yet, with what they take at least, as a heap."""
        found = [(self._sum(link_seconds, one), one) for one in self._allowed]
        heapify(found)
        return found

    def ascending(self) -> Iterator[tuple[float, int]]:
        """Yield each degree behind the lower bound of its time in seconds, ascending."""
        at = 0
        while at < len(self._allowed):
            while at == len(self._ordered):
                at_least, degree = self._waiting[0]
                if self._bounds.get(degree) == at_least:
                    self._ordered.append(heappop(self._waiting))
                else:
                    heapreplace(self._waiting, (self.bound(degree), degree))
            yield self._ordered[at]
            at += 1

    def bound(self, degree: int) -> float:
        """Return the lower bound of the time of all phases in so many chunks.

        Raises:
            ArithmeticError: the costs are absurd, and it is no finite number.
        """
        found = self._bounds.get(degree)
        if found is None:
            found = self._bounds[degree] = _finite(self._sum(lower_bound_seconds, degree))
        return found

    def times(self, degree: int) -> tuple[PhaseTime, ...]:
        """Return each phase's time in so many chunks."""
        self.seconds(degree)
        return self._times[degree]

    def seconds(self, degree: int) -> float:
        """Return the time of all phases in so many chunks."""
        found = self._seconds.get(degree)
        if found is None:
            times = tuple(self._chooser.time(phase, self._tokens, degree) for phase in self._phases)
            self._times[degree] = times
            found = self._seconds[degree] = _finite(sum(time.seconds for time in times))
        return found

    def _sum(self, least: Callable[..., float], degree: int) -> float:
        chooser = self._chooser
        return sum(
            [
                least(
                    costs=chooser.costs,
                    phase=phase,
                    strategy=chooser.strategy,
                    tokens=self._tokens,
                    degree=degree,
                )
                for phase in self._phases
            ]
        )


def _finite(seconds: float) -> float:
    """Return a time; one that is no finite number has no place in an order."""
    if not isfinite(seconds):
        raise ArithmeticError("the times of a phase are no finite numbers")
    return seconds


def near_best(chooser: DegreeChooser, phase: Phase, tokens: int) -> dict[int, float]:
    """Return the seconds of all degrees within `NOISE` of the best, and of some others."""
    degrees = SimulatedDegrees(chooser, [phase], tokens)
    found: dict[int, float] = {}
    for at_least, degree in degrees.ascending():
        if found and at_least > min(found.values()) * (1 + NOISE):
            break
        found[degree] = degrees.seconds(degree)
    return found


def fewest_near_best(
    chooser: DegreeChooser, tokens: int, fits: Callable[[tuple[int, int]], bool]
) -> tuple[PhaseTime, PhaseTime] | None:
    """Return the fewest chunks of both phases that tie with the best, or are within noise.

    Args:
        fits: tells of the degrees of both phases whether they may be chosen.

    Returns:
        None where nothing fits.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    forward, backward = (SimulatedDegrees(chooser, [phase], tokens) for phase in PHASES)
    pairs = sorted(
        (one + other, (first, second))
        for one, first in forward.ascending()
        for other, second in backward.ascending()
        if first == second or not chooser.is_paired
    )

    def seconds(degrees: tuple[int, int]) -> float:
        return forward.seconds(degrees[0]) + backward.seconds(degrees[1])

    best: float | None = None
    for at_least, degrees in pairs:
        if best is not None and at_least >= best:
            break
        if fits(degrees):
            found = seconds(degrees)
            best = found if best is None else min(best, found)
    if best is None:
        return None
    limit = best * (1 + (NOISE if chooser.is_measured else TIE))
    near = sorted((sum(degrees), degrees) for at_least, degrees in pairs if at_least <= limit)
    few = next(two for _, two in near if fits(two) and seconds(two) <= limit)
    (first,), (second,) = forward.times(few[0]), backward.times(few[1])
    return first, second
