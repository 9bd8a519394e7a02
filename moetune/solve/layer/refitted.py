"""A layer's phases and steps under refits of the measurements, all refits at once.

A simulated phase is bounded under all of them, and simulated under those where it may win.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs, Interference
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.model_error import StepErrorDraws
from moetune.solve.layer.refits import refits_of
from moetune.solve.layer.reuse import ChunkKind, Durations, chunk_of, least_seconds
from moetune.solve.layer.stacked import each, stacked
from moetune.solve.layer.steady import reused_seconds
from moetune.solve.layer.times import StepTime, phase_time

_Phase = tuple[Phase, int, Strategy]
"""A phase in so many chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """A simulated phase's chunks under each refit.

    Args:
        tables: of interference.
        least: lower bounds of the phase's seconds.
    """

    kind: ChunkKind
    durations: Sequence[Durations]
    tables: Sequence[Interference]
    least: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefittedTimes:
    """Times of a layer under each refit, with a draw of the model's error.

    Args:
        refits: the layer's costs under each.
        errors: draws by number of chunks.
    """

    refits: tuple[LayerCosts, ...]
    tokens: int
    order: Order
    errors: StepErrorDraws
    stack: LayerCosts = field(init=False)
    overhead_seconds: list[float] = field(init=False)
    _closed: dict[_Phase, list[float]] = field(default_factory=dict, init=False)
    _chunks: dict[_Phase, _Chunks] = field(default_factory=dict, init=False)
    _tables: dict[int, list[Interference]] = field(default_factory=dict, init=False)
    _simulated: dict[tuple[_Phase, int], float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", stacked(self.refits))
        overhead = self.stack.overhead(tokens=self.tokens).seconds
        object.__setattr__(self, "overhead_seconds", each(overhead, self.num))

    @classmethod
    def of(
        cls, costs: LayerCosts, resamples: Sequence[Costs], *, tokens: int, order: Order
    ) -> Self:
        """Return the times of the nominal costs' refits; without any those count as certain."""
        refits = refits_of(costs, resamples, tokens=tokens) or (costs,)
        errors = StepErrorDraws(costs.step_errors(tokens=tokens), num=len(refits))
        return cls(refits=refits, tokens=tokens, order=order, errors=errors)

    @property
    def num(self) -> int:
        """Refits."""
        return len(self.refits)

    def compare(
        self, draw: int, contenders: Sequence[Sequence[int]], strategy: Strategy
    ) -> tuple[float, float]:
        """Return the seconds of the chosen step and of the best one under a refit.

        Args:
            contenders: degrees of each phase, the chosen one first.
        """
        chosen = best = self.overhead_seconds[draw]
        for phase, (first, *others) in zip(PHASES, contenders, strict=True):
            seconds = least = self._phase(draw, (phase, first, strategy))
            bounds = sorted((self._least(draw, (phase, one, strategy)), one) for one in others)
            for at_least, degree in bounds:
                if at_least >= least:
                    break
                least = min(least, self._phase(draw, (phase, degree, strategy)))
            chosen += seconds
            best += least
        return chosen, best

    def faster(self, draw: int, step: StepTime, seconds: float) -> float:
        """Return the smaller of the seconds and those of the step's degrees and strategy.

        Strategies that reuse memory are simulated, unless a lower bound is too long already.
        """
        phases, overhead = _phases(step), self.overhead_seconds[draw]
        known = [self._least(draw, one) for one in phases]
        for at, one in enumerate(phases):
            if overhead + sum(known) >= seconds:
                return seconds
            known[at] = self._phase(draw, one)
        return min(seconds, overhead + sum(known))

    def seconds(self, step: StepTime) -> list[float]:
        """Return the step of these degrees and that strategy under each refit."""
        return [
            math.fsum([overhead, *(self._phase(draw, one) for one in _phases(step))])
            for draw, overhead in enumerate(self.overhead_seconds)
        ]

    def _least(self, draw: int, one: _Phase) -> float:
        """Return a lower bound of a phase that would be simulated, 0 of others."""
        _, degree, strategy = one
        if strategy == "none":
            return 0.0
        return self._chunks_of(one).least[draw] * self.errors.factor(strategy, degree, draw)

    def _phase(self, draw: int, one: _Phase) -> float:
        _, degree, strategy = one
        if strategy == "none":
            seconds = self._closed_of(one)[draw]
        else:
            seconds = self._simulated_of(draw, one)
        return seconds * self.errors.factor(strategy, degree, draw)

    def _closed_of(self, one: _Phase) -> list[float]:
        found = self._closed.get(one)
        if found is None:
            phase, degree, _ = one
            seconds = phase_time(
                costs=self.stack, phase=phase, tokens=self.tokens, degree=degree, order=self.order
            ).seconds
            found = self._closed[one] = each(seconds, self.num)
        return found

    def _simulated_of(self, draw: int, one: _Phase) -> float:
        found = self._simulated.get((one, draw))
        if found is None:
            chunks = self._chunks_of(one)
            found = self._simulated[one, draw] = reused_seconds(
                chunks.kind, chunks.durations[draw], degree=one[1],
                interference=chunks.tables[draw],
            )  # fmt: skip
        return found

    def _chunks_of(self, one: _Phase) -> _Chunks:
        found = self._chunks.get(one)
        if found is None:
            phase, degree, strategy = one
            rows = self.stack.rows(self.tokens, degree=degree)
            chunk = chunk_of(
                costs=self.stack, phase=phase, strategy=strategy, rows=rows, degree=degree
            )
            columns = (each(seconds, self.num) for seconds in chunk.durations)
            durations = list(zip(*columns, strict=True))
            kind, tables = chunk.kind(phase), self._tables_of(degree, rows)
            least = [
                least_seconds(kind, times, degree=degree, interference=table)
                for times, table in zip(durations, tables, strict=True)
            ]
            found = _Chunks(kind=kind, durations=durations, tables=tables, least=least)
            self._chunks[one] = found
        return found

    def _tables_of(self, degree: int, rows: float) -> list[Interference]:
        found = self._tables.get(degree)
        if found is None:
            transfer = each(self.stack.transfer(rows=rows, degree=degree).seconds, self.num)
            found = self._tables[degree] = [
                one.costs.interference.overlapped(one.speeds(rows=rows, transfer_seconds=seconds))
                for one, seconds in zip(self.refits, transfer, strict=True)
            ]
        return found


def _phases(step: StepTime) -> tuple[_Phase, ...]:
    """Return the phases of a step; one chunk each way reuses nothing."""
    strategy: Strategy = "none" if max(step.degrees) == 1 else step.strategy
    forward, backward = step.degrees
    return ("forward", forward, strategy), ("backward", backward, strategy)
