"""Degree of each phase: bounds, ranking, and closed forms where costs are lines."""

import math
from collections.abc import Iterable, Sequence
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

    @property
    def is_paired(self) -> bool:
        """Whether both phases get as many chunks: where costs are measured and no pins differ.

        The layer keeps rows for the backward pass by the pieces that the cuts of both phases
        make, f + b - gcd(f, b) of them. Its GEMMs run on pieces where a rank has several experts,
        and are then slower than those of a chunk, which is what was measured.
        """
        pins = {self.bounds.forward_degree, self.bounds.backward_degree} - {None}
        return self.is_measured and len(pins) <= 1

    def pinned(self, phase: Phase) -> int | None:
        """Return the degree pinned for the phase, or for both by a pin of the other one."""
        pinned = self.bounds.pinned(phase)
        if pinned is None and self.is_paired:
            return self.bounds.forward_degree or self.bounds.backward_degree
        return pinned

    def rank(self, phase: Phase, tokens: int) -> tuple[PhaseTime, ...]:
        """Return every allowed degree: the best one first, the others by time."""
        times = self._times(phase, tokens)
        best = self.degree(phase, tokens)
        return tuple(
            sorted(times, key=lambda time: (time.degree != best, time.seconds, time.degree))
        )

    def allowed(self, phase: Phase, tokens: int) -> range:
        """Return the degrees that the bounds and the memory leave."""
        pinned = self.pinned(phase)
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
        return self._simulated_best(tokens)[PHASES.index(phase)].degree

    def best(self, tokens: int) -> tuple[PhaseTime, PhaseTime]:
        """Return both phases at their best degrees, with every time computed once."""
        if self.is_closed or self.costs.world_size == 1:
            forward, backward = (
                self.time(phase, tokens, self.degree(phase, tokens)) for phase in PHASES
            )
            return forward, backward
        return self._simulated_best(tokens)

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

    def _simulated_best(self, tokens: int) -> tuple[PhaseTime, PhaseTime]:
        """Return both phases at the smallest degrees that tie with the best, or within noise."""
        times = [self._times(phase, tokens) for phase in PHASES]
        if self.is_paired:
            seconds = [[_seconds(pair) for pair in zip(*times, strict=True)]]
        else:
            seconds = [[time.seconds for time in each] for each in times]
        if self.is_measured and not self._is_worth_it(seconds, tokens):
            return times[0][0], times[1][0]
        chosen = [self._smallest_near_best(each) for each in seconds]
        return times[0][chosen[0]], times[1][chosen[-1]]

    def _smallest_near_best(self, seconds: Sequence[float]) -> int:
        """Return the index of the first that is near the least, of times by degree, ascending."""
        limit = min(seconds) * (1 + (NOISE if self.is_measured else TIE))
        return next(at for at, one in enumerate(seconds) if one <= limit)

    def _times(self, phase: Phase, tokens: int) -> list[PhaseTime]:
        return [self.time(phase, tokens, degree) for degree in self.allowed(phase, tokens)]

    def _is_worth_it(self, seconds: Sequence[Sequence[float]], tokens: int) -> bool:
        """Return whether chunks promise to save enough of the step.

        Args:
            seconds: of each phase, or of both together, by degree, ascending.
        """
        around = self.costs.overhead(tokens=tokens).seconds
        fewest = around + sum(each[0] for each in seconds)
        best = around + sum(map(min, seconds))
        return best <= fewest * (1 - WORTH)


def _seconds(phases: Iterable[PhaseTime]) -> float:
    return sum(phase.seconds for phase in phases)


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
