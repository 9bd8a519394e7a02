"""Degree of each phase: bounds, ranking, and closed forms where costs are lines."""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, takewhile

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.cost_keys import GemmKey
from moetune.domain.costs import LinearCost
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.budget import Degrees, MemoryBudget
from moetune.solve.layer.closed import closed_seconds
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.room import Room
from moetune.solve.layer.times import PhaseTime, phase_time
from moetune.solve.layer.worth_ranking import worth_ranking, worth_ranking_together

NOISE = 0.01
"""Measured costs cannot tell times apart that differ by less: fewer chunks are then safer."""
WORTH = 0.05
"""Share of a step that chunks must promise to save where costs are measured.

About the error of a step predicted from them (`docs/results/netlab.md`). Steps of several
chunks share most of it, so that among them `NOISE` is enough.
"""


PhaseTimes = tuple[PhaseTime, PhaseTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree of each phase for any number of tokens.

    Args:
        budget: memory that the peak of a step has to fit into; None without a bound.

    Attributes:
        is_measured: whether the costs come from measurements, with their noise, not from lines.
        is_paired: whether both phases get as many chunks: where costs are measured and no pins
            differ. The layer keeps rows for the backward pass by the pieces that the cuts of both
            phases make, f + b - gcd(f, b) of them. Its GEMMs run on pieces where a rank has several
            experts, and are then slower than those of a chunk (`LayerCosts.in_chunks`).
    """

    costs: LayerCosts
    bounds: Bounds
    strategy: Strategy = "none"
    budget: MemoryBudget | None = None
    room: Room | None = field(init=False)
    is_measured: bool = field(init=False)
    is_paired: bool = field(init=False)
    _lines: dict[Phase, tuple[LinearCost, LinearCost] | None] = field(init=False)

    def __post_init__(self) -> None:
        forward, backward = self.bounds.forward_degree, self.bounds.backward_degree
        if forward is not None and backward is not None:
            # All that is asked of the costs is then of these degrees.
            object.__setattr__(self, "costs", self.costs.in_chunks(forward, backward))
        closed = self.costs.costs.interference.is_none and self.strategy == "none"
        closed &= self.bounds.chosen_order == "dispatch_first" and self.costs.world_size > 1
        lines = {phase: self.costs.lines(phase) if closed else None for phase in PHASES}
        object.__setattr__(self, "_lines", lines)
        pins = {forward, backward} - {None}
        is_measured = self.costs.costs.line(GemmKey(self.costs.dtype)) is None
        object.__setattr__(self, "is_measured", is_measured)
        object.__setattr__(self, "is_paired", is_measured and len(pins) <= 1)
        room = None
        if self.budget is not None:
            most = self.bounds.max_degree
            room = Room(self.budget, strategy=self.strategy, max_degree=most)
        object.__setattr__(self, "room", room)

    @property
    def is_closed(self) -> bool:
        """Whether every best degree comes from a closed form, at once and exact."""
        one_rank = self.costs.world_size == 1 and self.strategy == "none"
        return one_rank or all(lines is not None for lines in self._lines.values())

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase, or for both by a pin of the other one."""
        pinned = self.bounds.pinned(phase)
        if pinned is None and self.is_paired:
            return self.bounds.forward_degree or self.bounds.backward_degree
        return pinned

    def rank(self, phase: Phase, tokens: int, best: Degrees | None = None) -> tuple[PhaseTime, ...]:
        """Return the degrees that fit beside the other phase's best: the best first, then by time.

        Only those that are `worth_ranking`.

        Args:
            best: of both phases; default, `degrees`.
        """
        at = PHASES.index(phase)
        best = best or self.degrees(tokens)

        def fits(degree: int) -> bool:
            return self.fits(tokens, self._beside(at, degree, best))

        if self.is_paired:
            forward, backward = (self.seconds(one, tokens) for one in PHASES)
            around_seconds = self.costs.overhead(tokens=tokens).seconds
            among = worth_ranking_together(
                (forward, backward),
                fits,
                chosen=best[0],
                around_seconds=around_seconds,
                ties=False,
            )
        else:
            among = worth_ranking(self.seconds(phase, tokens), fits, chosen=best[at], ties=False)
        times = [self.time(phase, tokens, one) for one in {best[at], *among}]
        return tuple(
            sorted(times, key=lambda time: (time.degree != best[at], time.seconds, time.degree))
        )

    def fits(self, tokens: int, degrees: Degrees) -> bool:
        """Return whether the degrees of both phases fit into the memory."""
        return self.room is None or self.room.fits(tokens, degrees)

    def allowed(self, phase: Phase, tokens: int) -> Sequence[int]:
        """Return the degrees that bounds and pins leave, and that fit beside the other phase's.

        Ascending. Where the other phase's degree is free, any of its own `allowed` ones. Where
        nothing fits, the one with the least memory.
        """
        every = self._bounded(phase, tokens)
        at = PHASES.index(phase)
        other = self._bounded(PHASES[1 - at], tokens)
        if self.room is None or self.pinned(phase) is not None or self.room.fits_all(tokens):
            return every
        if self.is_paired:
            return self.room.equal(tokens, every)
        if len(other) > 1:
            return self.room.degrees(tokens, every)
        pairs = [self._beside(at, one, (other[0], other[0])) for one in every]
        return [pair[at] for pair in self.room.fitting(tokens, pairs)]

    def allows(self, tokens: int, degrees: Degrees) -> bool:
        """Return whether each phase's degree is among those `allowed`."""
        bounded = [self._bounded(phase, tokens) for phase in PHASES]
        if not all(one in each for one, each in zip(degrees, bounded, strict=True)):
            return False
        is_pair = self.is_paired and degrees[0] == degrees[1]
        if self.room is None or (is_pair and self.fits(tokens, degrees)):
            return True
        allowed = (self.allowed(phase, tokens) for phase in PHASES)
        return all(one in each for one, each in zip(degrees, allowed, strict=True))

    def degrees(self, tokens: int) -> Degrees:
        """Return the best degrees for so many tokens.

        Where those do not fit, the best of those that are `allowed`.
        """
        free = self._best_among(tokens, [self._bounded(phase, tokens) for phase in PHASES])
        if self.fits(tokens, free):
            return free
        return self._best_among(tokens, [self.allowed(phase, tokens) for phase in PHASES])

    def degrees_that_fit(self, tokens: int) -> Degrees | None:
        """Return the best degrees of all pairs that fit; None where none does."""
        every = [self._bounded(phase, tokens) for phase in PHASES]
        free = self._best_among(tokens, every)
        if self.room is None or self.room.fits(tokens, free):
            return free
        if self.is_paired or min(map(len, every)) == 1:
            found = self._best_among(tokens, [self.allowed(phase, tokens) for phase in PHASES])
            return found if self.room.fits(tokens, found) else None
        return self._best_pair(tokens, every)

    def best(self, tokens: int) -> PhaseTimes:
        """Return both phases at their best degrees."""
        forward, backward = self.degrees(tokens)
        return self.time("forward", tokens, forward), self.time("backward", tokens, backward)

    def time(self, phase: Phase, tokens: int, degree: int) -> PhaseTime:
        """Return the phase's time at a degree."""
        return phase_time(
            costs=self.costs,
            phase=phase,
            tokens=tokens,
            degree=degree,
            order=self.bounds.chosen_order,
            strategy=self.strategy,
        )

    def _bounded(self, phase: Phase, tokens: int) -> range:
        """Return the degrees that bounds and pins leave, ascending."""
        pinned = self.pinned(phase)
        if pinned is not None:
            pinned = min(pinned, tokens)
            return range(pinned, pinned + 1)
        return range(1, self.bounds.largest(tokens) + 1)

    def _beside(self, at: int, degree: int, others: Degrees) -> Degrees:
        """Return the degrees of both phases where the one at the index has so many."""
        if self.is_paired:
            return degree, degree
        return (others[0], degree) if at else (degree, others[1])

    def _best_pair(self, tokens: int, among: Sequence[Sequence[int]]) -> Degrees | None:
        """Return the best pair of these degrees that fits, the fewest chunks of those that tie."""
        forward, backward = (
            [self.time(phase, tokens, one) for one in each]
            for phase, each in zip(PHASES, among, strict=True)
        )
        pairs = sorted(product(forward, backward), key=_seconds)
        fitting = (pair for pair in pairs if self.fits(tokens, _degrees(pair)))
        found = next(fitting, None)
        if found is None:
            return None
        limit = _seconds(found) * (1 + TIE)
        tied = takewhile(lambda pair: _seconds(pair) <= limit, fitting)
        return min([_degrees(found), *map(_degrees, tied)], key=lambda two: (sum(two), two))

    def _best_among(self, tokens: int, among: Sequence[Sequence[int]]) -> Degrees:
        """Return the best of the degrees of each phase, which are ascending."""
        if max(map(len, among)) == 1 or self.costs.world_size == 1:
            return among[0][0], among[1][0]
        if self.is_closed:
            forward, backward = (
                self._closed(phase, tokens, each) for phase, each in zip(PHASES, among, strict=True)
            )
            return forward, backward
        return self._simulated(tokens, among)

    def _closed(self, phase: Phase, tokens: int, among: Sequence[int]) -> int:
        lines = self._lines[phase]
        if lines is None or len(among) == 1:
            return among[0]
        rows = self.costs.rows(tokens)
        best = self.costs.best_degree(lines, rows=rows, max_degree=among[-1])
        if best in among or best < among[0]:
            return max(best, among[0])
        # Beside a pinned degree, memory may leave out degrees between two that fit.
        place = bisect(among, best)
        near = among[place - 1], among[place]
        return min(near, key=lambda one: self.time(phase, tokens, one).seconds)

    def _simulated(self, tokens: int, among: Sequence[Sequence[int]]) -> Degrees:
        """Return the smallest degrees that tie with the best, or are within noise of it.

        Measured chunks have to be worth it, too.
        """
        forward, backward = (self.seconds(phase, tokens) for phase in PHASES)
        if not self.is_paired:
            return _first_tied(forward, among[0]), _first_tied(backward, among[1])
        both = {one: forward[one] + backward[one] for one in among[0]}
        fewest, best = among[0][0], min(both.values())
        if self._is_worth_it(both[fewest], best, tokens):
            fewest = next(one for one, each in both.items() if each <= best * (1 + NOISE))
        return fewest, fewest

    def seconds(self, phase: Phase, tokens: int) -> Mapping[int, float]:
        """Return the seconds of a phase without reuse in every number of chunks."""
        degrees, order = self._bounded(phase, tokens), self.bounds.chosen_order

        def seconds() -> Mapping[int, float]:
            found = closed_seconds(
                costs=self.costs, phase=phase, tokens=tokens, degrees=degrees, order=order
            )
            if found is None:
                found = [self.time(phase, tokens, one).seconds for one in degrees]
            return dict(zip(degrees, found, strict=True))

        return self.costs.kept(("seconds", phase, tokens, degrees, order), seconds)

    def _is_worth_it(self, fewest_seconds: float, best_seconds: float, tokens: int) -> bool:
        """Return whether chunks promise to save enough of the step.

        Args:
            fewest_seconds: of both phases in the fewest chunks.
            best_seconds: in as many as are best.
        """
        around = self.costs.overhead(tokens=tokens).seconds
        return around + best_seconds <= (around + fewest_seconds) * (1 - WORTH)


def _first_tied(seconds: Mapping[int, float], degrees: Sequence[int]) -> int:
    """Return the first of the degrees that ties with the best of them."""
    limit = min(seconds[one] for one in degrees) * (1 + TIE)
    return next(one for one in degrees if seconds[one] <= limit)


def _seconds(phases: Iterable[PhaseTime]) -> float:
    return sum(phase.seconds for phase in phases)


def _degrees(pair: PhaseTimes) -> Degrees:
    return pair[0].degree, pair[1].degree
