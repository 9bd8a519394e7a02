"""A layer's phases and steps under refits of the measurements, all refits at once.

A simulated phase is bounded under all of them, and simulated under those where it may win, all that
are wanted at a time together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs, Interference
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.many_phases import (
    Bools,
    ManyPhases,
    reused_seconds_of_many,
    speeds_of,
)
from moetune.solve.layer.model_error import StepErrorDraws
from moetune.solve.layer.refits import refits_of
from moetune.solve.layer.reuse import ChunkKind, chunk_of, least_seconds
from moetune.solve.layer.stacked import each, stacked
from moetune.solve.layer.times import StepTime, phase_time

_Phase = tuple[Phase, int, Strategy]
"""A phase in so many chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """A simulated phase's chunks under each refit.

    Args:
        durations: shape (5, refits).
        speeds: shape (9, refits).
        least: lower bounds of the phase's seconds, shape (refits,).
        seconds: those that were simulated, and infinity, shape (refits,).
    """

    kind: ChunkKind
    durations: Floats
    speeds: Floats
    least: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RefittedTimes:
    """Times of a layer under each refit, with a draw of the model's error.

    All seconds have the shape (refits,).

    Args:
        refits: the layer's costs under each.
        errors: draws by number of chunks.
    """

    refits: tuple[LayerCosts, ...]
    tokens: int
    order: Order
    errors: StepErrorDraws
    stack: LayerCosts = field(init=False)
    overhead_seconds: Floats = field(init=False)
    _closed: dict[_Phase, Floats] = field(default_factory=dict, init=False)
    _chunks: dict[_Phase, _Chunks] = field(default_factory=dict, init=False)
    _tables: dict[int, list[Interference]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", stacked(self.refits))
        overhead = self.stack.overhead(tokens=self.tokens).seconds
        object.__setattr__(self, "overhead_seconds", np.broadcast_to(overhead, self.num))

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
        self, contenders: Sequence[Sequence[int]], strategy: Strategy
    ) -> tuple[Floats, Floats]:
        """Return the seconds of the chosen step and of the best one.

        Args:
            contenders: degrees of each phase, the chosen one first.
        """
        phases: list[list[_Phase]] = [
            [(phase, degree, strategy) for degree in degrees]
            for phase, degrees in zip(PHASES, contenders, strict=True)
        ]
        everywhere = np.ones(self.num, bool)
        self._simulate((first, everywhere) for first, *_ in phases)
        self._simulate(
            (other, self._least(other) < self._phase(first))
            for first, *others in phases
            for other in others
        )
        chosen = best = self.overhead_seconds
        for first, *others in phases:
            seconds = self._phase(first)
            chosen = chosen + seconds
            best = best + np.minimum.reduce([seconds, *map(self._phase, others)])
        return chosen, best

    def faster(self, steps: Sequence[StepTime], seconds: Floats) -> Floats:
        """Return the least of the seconds and those of the steps' degrees and strategies.

        Strategies that reuse memory are simulated, unless a lower bound is too long already.
        """
        self._simulate(
            (one, self._sum(map(self._least, _phases(step))) < seconds)
            for step in steps
            for one in _phases(step)
        )
        return np.minimum.reduce([seconds, *map(self._step, steps)])  # type: ignore[no-any-return]

    def seconds(self, step: StepTime) -> Floats:
        """Return the step of these degrees and that strategy."""
        self._simulate((one, np.ones(self.num, bool)) for one in _phases(step))
        return self._step(step)

    def _step(self, step: StepTime) -> Floats:
        return self._sum(map(self._phase, _phases(step)))

    def _sum(self, phases: Iterable[Floats]) -> Floats:
        forward, backward = phases
        return self.overhead_seconds + (forward + backward)

    def _least(self, one: _Phase) -> Floats:
        """Return a lower bound of a phase that would be simulated, 0 of others."""
        _, degree, strategy = one
        if strategy == "none":
            return np.zeros(self.num)
        return self._chunks_of(one).least * self.errors.factors(strategy, degree)

    def _phase(self, one: _Phase) -> Floats:
        """Return the phase's seconds; infinity where it was to be simulated, and was not."""
        _, degree, strategy = one
        seconds = self._closed_of(one) if strategy == "none" else self._chunks_of(one).seconds
        return seconds * self.errors.factors(strategy, degree)

    def _closed_of(self, one: _Phase) -> Floats:
        found = self._closed.get(one)
        if found is None:
            phase, degree, _ = one
            seconds = phase_time(
                costs=self.stack, phase=phase, tokens=self.tokens, degree=degree, order=self.order
            ).seconds
            found = self._closed[one] = np.broadcast_to(seconds, self.num)
        return found

    def _simulate(self, wanted: Iterable[tuple[_Phase, Bools]]) -> None:
        """Simulate phases under some refits each, all of them at once, but for those known."""
        chunks = {one: (self._chunks_of(one), where) for one, where in wanted if one[2] != "none"}
        runs = [
            (number, one[1], found, np.flatnonzero(where & np.isinf(found.seconds)))
            for number, (one, (found, where)) in enumerate(chunks.items())
        ]
        if not runs:
            return
        seconds = reused_seconds_of_many(
            ManyPhases(
                kinds=[found.kind for _, _, found, _ in runs],
                kind=np.concatenate([np.full(len(at), number) for number, _, _, at in runs]),
                degree=np.concatenate([np.full(len(at), degree) for _, degree, _, at in runs]),
                durations=np.hstack([found.durations[:, at] for _, _, found, at in runs]),
                speeds=np.hstack([found.speeds[:, at] for _, _, found, at in runs]),
            )
        )
        ends = np.cumsum([len(at) for *_, at in runs])
        for (_, _, found, at), some in zip(runs, np.split(seconds, ends[:-1]), strict=True):
            found.seconds[at] = some

    def _chunks_of(self, one: _Phase) -> _Chunks:
        found = self._chunks.get(one)
        if found is None:
            phase, degree, strategy = one
            rows = self.stack.rows(self.tokens, degree=degree)
            chunk = chunk_of(
                costs=self.stack, phase=phase, strategy=strategy, rows=rows, degree=degree
            )
            columns = [each(seconds, self.num) for seconds in chunk.durations]
            kind, tables = chunk.kind(phase), self._tables_of(degree, rows)
            least = [
                least_seconds(kind, times, degree=degree, interference=table)
                for times, table in zip(zip(*columns, strict=True), tables, strict=True)
            ]
            found = self._chunks[one] = _Chunks(
                kind=kind,
                durations=np.array(columns),
                speeds=np.array([speeds_of(table) for table in tables]).T,
                least=np.array(least),
                seconds=np.full(self.num, np.inf),
            )
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
