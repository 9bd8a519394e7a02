"""Every choice that is allowed for one size, in the order of its time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from moetune.domain.costs import Costs
from moetune.domain.layer import Workload
from moetune.solve.choice import Bounds, DegreeChooser
from moetune.solve.memory import tokens_that_fit
from moetune.solve.phases import PHASES, LayerCosts, layer_costs
from moetune.solve.predict import PhaseTime, StepTime, step_time
from moetune.solve.words import explain_pin

NUM_ALTERNATIVES = 5
WORTH_A_WARNING = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All degrees that are allowed, best first.

    Args:
        free: chooser without pins and without a memory limit.
        sequential: one chunk each way, allowed or not.
    """

    tokens: int
    costs: LayerCosts
    bounds: Bounds
    chooser: DegreeChooser
    free: DegreeChooser
    forward: tuple[PhaseTime, ...]
    backward: tuple[PhaseTime, ...]
    sequential: StepTime

    @property
    def best(self) -> StepTime:
        """The chosen step."""
        return self.step(self.forward[0], self.backward[0])

    @property
    def memory_forced(self) -> bool:
        """Whether the buffers of more than one chunk would be taken if they fitted."""
        best = self.best.forward.degree, self.best.backward.degree
        wanted = (self.free.degree(phase, self.tokens) for phase in PHASES)
        return self.tokens > self.chooser.max_pipelined_tokens and max(wanted) > max(best)

    def step(self, forward: PhaseTime, backward: PhaseTime) -> StepTime:
        """Return the step of these phases."""
        return StepTime(forward=forward, backward=backward, overhead=self.sequential.overhead)

    def others(self) -> list[StepTime]:
        """Return the choices next in time, and one chunk each way wherever that is allowed."""
        near = (phase[:NUM_ALTERNATIVES] for phase in (self.forward, self.backward))
        steps = [self.step(forward, backward) for forward, backward in product(*near)][1:]
        steps.sort(key=_order_of_steps)
        allowed = (
            {time.degree for time in self.forward},
            {time.degree for time in self.backward},
        )
        best = self.best
        is_sequential = best.forward.degree == best.backward.degree == 1
        if is_sequential or not all(1 in degrees for degrees in allowed):
            return steps[:NUM_ALTERNATIVES]
        others = [step for step in steps if not step.forward.degree == step.backward.degree == 1]
        return sorted([*others[: NUM_ALTERNATIVES - 1], self.sequential], key=_order_of_steps)

    def pin_warnings(self) -> Iterator[str]:
        """Yield what each pin costs where that is more than a trifle."""
        for phase, chosen in zip(PHASES, (self.forward[0], self.backward[0]), strict=True):
            if self.bounds.pinned(phase) is None:
                continue
            best = self.free.rank(phase, self.tokens)[0]
            slower = chosen.seconds / best.seconds - 1
            if slower > WORTH_A_WARNING:
                yield explain_pin(
                    phase=phase, pinned=chosen.degree, best=best.degree, slower=slower
                )


def rank_choices(*, workload: Workload, costs: Costs, bounds: Bounds, limit_bytes: int) -> Ranking:
    """Return the choices that the bounds and the memory leave."""
    layer = layer_costs(workload=workload, costs=costs)
    tokens = workload.tokens_per_rank
    chooser = DegreeChooser(
        costs=layer,
        bounds=bounds,
        max_pipelined_tokens=tokens_that_fit(
            workload=workload, limit_bytes=limit_bytes, pipelined=True
        ),
    )
    return Ranking(
        tokens=tokens,
        costs=layer,
        bounds=bounds,
        chooser=chooser,
        free=DegreeChooser(
            costs=layer, bounds=replace(bounds, forward_degree=None, backward_degree=None)
        ),
        forward=chooser.rank("forward", tokens),
        backward=chooser.rank("backward", tokens),
        sequential=step_time(
            costs=layer,
            tokens=tokens,
            forward_degree=1,
            backward_degree=1,
            order=bounds.chosen_order,
        ),
    )


def _order_of_steps(step: StepTime) -> tuple[float, int, int]:
    return step.seconds, step.forward.degree, step.backward.degree
