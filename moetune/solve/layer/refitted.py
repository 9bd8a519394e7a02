"""A layer's phases and steps under refits of the measurements, all refits at once.

All simulated phases that are wanted at a time are simulated together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.model_error import StepErrorDraws
from moetune.solve.layer.refits import Refits, stacked_refits
from moetune.solve.layer.reuse import chunk_of
from moetune.solve.layer.reuse_times import ReusedPhases, reused_seconds
from moetune.solve.layer.times import StepTime, phase_time

_Phase = tuple[Phase, int, Strategy]
"""A phase in so many chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefittedTimes:
    """Times of a layer under each refit, with a draw of the model's error.

    All seconds have the shape (refits,).

    Args:
        errors: draws by number of chunks.
    """

    refits: Refits
    tokens: int
    order: Order
    errors: StepErrorDraws
    overhead_seconds: Floats = field(init=False)
    _known: dict[_Phase, Floats] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        overhead = self.stack.overhead(tokens=self.tokens).seconds
        object.__setattr__(self, "overhead_seconds", np.broadcast_to(overhead, self.num))

    @classmethod
    def of(
        cls, costs: LayerCosts, resamples: Sequence[Costs], *, tokens: int, order: Order
    ) -> Self:
        """Return the times of the nominal costs' refits; without any those count as certain."""
        refits = stacked_refits(costs, resamples, tokens=tokens)
        errors = StepErrorDraws(costs.step_errors(tokens=tokens), num=refits.num)
        return cls(refits=refits, tokens=tokens, order=order, errors=errors)

    @property
    def num(self) -> int:
        """Refits."""
        return self.refits.num

    @property
    def stack(self) -> LayerCosts:
        """The layer's costs under all refits at once."""
        return self.refits.stack

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
        self._simulate(one for each in phases for one in each)
        chosen = best = self.overhead_seconds
        for first, *others in phases:
            seconds = self._phase(first)
            chosen = chosen + seconds
            best = best + np.minimum.reduce([seconds, *map(self._phase, others)])
        return chosen, best

    def faster(self, steps: Sequence[StepTime], seconds: Floats) -> Floats:
        """Return the least of the seconds and those of the steps' degrees and strategies."""
        self._simulate(one for step in steps for one in _phases(step))
        return np.minimum.reduce([seconds, *map(self._step, steps)])  # type: ignore[no-any-return]

    def seconds(self, step: StepTime) -> Floats:
        """Return the step of these degrees and that strategy."""
        self._simulate(_phases(step))
        return self._step(step)

    def _step(self, step: StepTime) -> Floats:
        return self._sum(map(self._phase, _phases(step)))

    def _sum(self, phases: Iterable[Floats]) -> Floats:
        forward, backward = phases
        return self.overhead_seconds + (forward + backward)

    def _phase(self, one: _Phase) -> Floats:
        """Return the phase's seconds."""
        _, degree, strategy = one
        if one not in self._known:
            self._known[one] = self._closed(one)
        return self._known[one] * self.errors.factors(strategy, degree)

    def _closed(self, one: _Phase) -> Floats:
        phase, degree, _ = one
        seconds = phase_time(
            costs=self.stack, phase=phase, tokens=self.tokens, degree=degree, order=self.order
        ).seconds
        return np.broadcast_to(seconds, self.num)

    def _simulate(self, wanted: Iterable[_Phase]) -> None:
        """Simulate phases under all refits, all of them at once, but for those known."""
        new = dict.fromkeys(one for one in wanted if one[2] != "none" and one not in self._known)
        if new:
            seconds = reused_seconds([self._under_all(one) for one in new])
            self._known.update(zip(new, seconds, strict=True))

    def _under_all(self, one: _Phase) -> ReusedPhases:
        """Return the phase under each refit."""
        phase, degree, strategy = one
        rows = self.stack.rows(self.tokens, degree=degree)
        chunk = chunk_of(costs=self.stack, phase=phase, strategy=strategy, rows=rows, degree=degree)
        table = self.stack.interference(rows=rows, degree=degree)
        return ReusedPhases(chunk, phase, np.full(self.num, degree), table)


def _phases(step: StepTime) -> tuple[_Phase, ...]:
    """Return the phases of a step; one chunk each way reuses nothing."""
    strategy: Strategy = "none" if max(step.degrees) == 1 else step.strategy
    forward, backward = step.degrees
    return ("forward", forward, strategy), ("backward", backward, strategy)
