"""Degree of each phase: bounds, ranking, and closed forms where costs are lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.times import PhaseTime, phase_time

NOISE = 0.01
"""Measured costs cannot tell times apart that differ by less: fewer chunks are then safer."""
WORTH = 0.05
"""Share of a step that chunks must promise to save where costs are measured.

About the error of a step predicted from them (`docs/results/netlab.md`). Steps of several
chunks share most of it, so that among them `NOISE` is enough.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeChooser:
    """The best degree of each phase for any number of tokens.

    Args:
        max_pipelined_tokens: most tokens for which the buffers of more than one chunk fit,
            without reuse.
        budget: memory that bounds the degrees from below; None without a bound.
    """

    costs: LayerCosts
    bounds: Bounds
    max_pipelined_tokens: float = math.inf
    strategy: Strategy = "none"
    budget: MemoryBudget | None = None
    _lines: dict[Phase, tuple[LinearCost, LinearCost] | None] = field(init=False)

    def __post_init__(self) -> None:
        closed = self.costs.costs.interference.is_none and self.strategy == "none"
        closed &= self.bounds.chosen_order == "dispatch_first" and self.costs.world_size > 1
        lines = {phase: self.costs.lines(phase) if closed else None for phase in PHASES}
        object.__setattr__(self, "_lines", lines)

    @property
    def is_closed(self) -> bool:
        """Whether every best degree comes from a closed form, at once and exact."""
        one_rank = self.costs.world_size == 1 and self.strategy == "none"
        return one_rank or all(lines is not None for lines in self._lines.values())

    @property
    def is_measured(self) -> bool:
        """Whether the costs come from measurements, with their noise, and not from lines."""
        return self.costs.costs.gemm_line(dtype=self.costs.dtype) is None

    def rank(self, phase: Phase, tokens: int) -> tuple[PhaseTime, ...]:
        """Return every allowed degree: the best one first, the others by time."""
        times = [self.time(phase, tokens, degree) for degree in self.allowed(phase, tokens)]
        if self._lines[phase] is not None or self.costs.world_size == 1:
            best = self.degree(phase, tokens)
        else:
            best = self._smallest_best(times, tokens)
        return tuple(
            sorted(times, key=lambda time: (time.degree != best, time.seconds, time.degree))
        )

    def allowed(self, phase: Phase, tokens: int) -> range:
        """Return the degrees that the bounds and the memory leave."""
        pinned = self.bounds.pinned(phase)
        if pinned is not None:
            pinned = min(pinned, tokens)
            return range(pinned, pinned + 1)
        largest = self.bounds.largest(tokens)
        if self.budget is not None:
            fewest = self.budget.fewest_chunks(
                strategy=self.strategy, tokens=tokens, largest=largest
            )
            return range(fewest, largest + 1)
        fits = tokens <= self.max_pipelined_tokens
        return range(1, (largest if fits else 1) + 1)

    def degree(self, phase: Phase, tokens: int) -> int:
        """Return the best degree for so many tokens."""
        allowed = self.allowed(phase, tokens)
        if len(allowed) == 1 or self.costs.world_size == 1:
            return allowed[0]
        lines = self._lines[phase]
        if lines is not None:
            rows = tokens * self.costs.layer.top_k
            best = self.costs.best_degree(lines, rows=rows, max_degree=allowed[-1])
            return max(best, allowed[0])
        return self._smallest_best([self.time(phase, tokens, degree) for degree in allowed], tokens)

    def best(self, tokens: int) -> tuple[PhaseTime, PhaseTime]:
        """Return both phases at their best degrees, with every time computed once."""
        if self.is_closed or self.costs.world_size == 1:
            forward, backward = (
                self.time(phase, tokens, self.degree(phase, tokens)) for phase in PHASES
            )
            return forward, backward
        times = [self._times(phase, tokens) for phase in PHASES]
        if self.is_measured and not self._is_worth_it(times, tokens):
            return times[0][0], times[1][0]
        forward, backward = (self._smallest_near_best(each) for each in times)
        return forward, backward

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

    def _smallest_best(self, times: Sequence[PhaseTime], tokens: int) -> int:
        """Return the smallest degree whose time ties with the best one, or is within noise.

        Args:
            times: by degree, ascending.
        """
        if self.is_measured and not self._is_worth_it(
            [self._times(phase, tokens) for phase in PHASES], tokens
        ):
            return times[0].degree
        return self._smallest_near_best(times).degree

    def _smallest_near_best(self, times: Sequence[PhaseTime]) -> PhaseTime:
        limit = min(time.seconds for time in times) * (1 + (NOISE if self.is_measured else TIE))
        near = (time for time in times if time.seconds <= limit)
        return min(near, key=lambda time: time.degree)

    def _times(self, phase: Phase, tokens: int) -> list[PhaseTime]:
        return [self.time(phase, tokens, degree) for degree in self.allowed(phase, tokens)]

    def _is_worth_it(self, times: Sequence[Sequence[PhaseTime]], tokens: int) -> bool:
        """Return whether chunks promise to save enough of the step.

        Args:
            times: of each phase, by degree, ascending.
        """
        fewest = best = self.costs.overhead(tokens=tokens).seconds
        for each in times:
            fewest += each[0].seconds
            best += min(time.seconds for time in each)
        return best <= fewest * (1 - WORTH)


def check_pins(*, bounds: Bounds, tokens: int) -> None:
    """Raise InfeasiblePlanError where a pinned degree is not among those allowed."""
    largest = bounds.largest(tokens)
    for phase in PHASES:
        pinned = bounds.pinned(phase)
        if pinned is None or pinned <= largest:
            continue
        what = f"{phase}_degree {pinned} is infeasible: "
        flag = f"--{phase}-degree"
        if pinned > bounds.max_degree:
            raise InfeasiblePlanError(
                f"{what}max_degree is {bounds.max_degree}",
                f"nearest: {flag} {largest}, or allow more with --max-degree {pinned}",
            )
        raise InfeasiblePlanError(
            f"{what}{tokens} tokens per rank in chunks of at least {bounds.min_chunk_tokens} "
            f"make at most {largest}",
            f"nearest: {flag} {largest}, or {pinned * bounds.min_chunk_tokens} tokens",
        )
