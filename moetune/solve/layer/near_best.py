"""Best degrees where memory is reused: few are simulated, as bounds exclude the others."""

from collections.abc import Callable, Sequence
from operator import itemgetter

from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.choose import NOISE, DegreeChooser
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.reuse import lower_bound_seconds
from moetune.solve.layer.times import PhaseTime


class SimulatedDegrees:
    """The allowed degrees of a phase, or of both in as many chunks, simulated when first wanted.

    Args:
        phases: one, or both where they are paired.
        bounds: lower bounds of their times in seconds by degree, ascending.
    """

    def __init__(self, chooser: DegreeChooser, phases: Sequence[Phase], tokens: int) -> None:
        self._chooser = chooser
        self._phases = phases
        self._tokens = tokens
        self._times: dict[int, tuple[PhaseTime, ...]] = {}
        self._seconds: dict[int, float] = {}
        bounds = (
            (degree, sum([self._bound(phase, degree) for phase in phases]))
            for degree in chooser.allowed(phases[0], tokens)
        )
        self.bounds = dict(sorted(bounds, key=itemgetter(1)))

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
            found = self._seconds[degree] = sum(time.seconds for time in times)
        return found

    def is_near_best(self, degree: int, tolerance: float) -> bool:
        """Return whether the degree's time is so near to the best one's.

        Others are simulated, those with the smallest bounds first, until that is certain.
        """
        if degree not in self.bounds:
            return False
        if not self._seconds:
            self.seconds(next(iter(self.bounds)))
        longer = 1 + tolerance
        limit = min(self._seconds.values()) * longer
        if self.bounds[degree] > limit:
            return False
        seconds = self.seconds(degree)
        if seconds > limit:
            return False
        for other, at_least in self.bounds.items():
            if seconds <= at_least * longer:
                return True
            if seconds > self.seconds(other) * longer:
                return False
        return True

    def _bound(self, phase: Phase, degree: int) -> float:
        return lower_bound_seconds(
            costs=self._chooser.costs,
            phase=phase,
            strategy=self._chooser.strategy,
            tokens=self._tokens,
            degree=degree,
        )


def near_best(chooser: DegreeChooser, phase: Phase, tokens: int) -> dict[int, float]:
    """Return the seconds of all degrees within `NOISE` of the best, and of some others."""
    degrees = SimulatedDegrees(chooser, [phase], tokens)
    found: dict[int, float] = {}
    for degree, at_least in degrees.bounds.items():
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
        for first, one in forward.bounds.items()
        for second, other in backward.bounds.items()
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
    few = next((two for _, two in near if fits(two) and seconds(two) <= limit), None)
    if few is None:
        raise ArithmeticError("the times of a phase are no finite numbers")
    (first,), (second,) = forward.times(few[0]), backward.times(few[1])
    return first, second
