"""The choice of degrees with one strategy within the memory, and what it is compared with."""

from dataclasses import dataclass, replace

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.layer import PHASES
from moetune.domain.plan import Memory
from moetune.solve.layer.choose import DegreeChooser, DegreeTable, rounded
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import Degrees, MemoryBudget
from moetune.solve.layer.times import StepTime, step_time

NUM_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The degrees chosen with one strategy, and the table that they were chosen from.

    Args:
        strategy: the plan's. One chunk each way reuses no memory: the chooser is then that of
            "none", whatever the strategy.
        budget: the memory that the choice has to fit into.
        chooser: of other numbers of tokens.
        table: that the degrees were chosen from.
        sequential: one chunk each way, allowed or not.
        degrees: the chosen ones.
        fits: whether they fit into the memory; where none do, they are the fastest.
    """

    tokens: int
    strategy: Strategy
    costs: LayerCosts
    bounds: Bounds
    budget: MemoryBudget
    chooser: DegreeChooser
    table: DegreeTable
    sequential: StepTime
    degrees: Degrees
    fits: bool = True

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.in_chunks(self.degrees)

    @property
    def memory(self) -> Memory:
        """The memory of the chosen step."""
        return self.budget.memory(strategy=self.strategy, degrees=self.degrees)

    @property
    def order(self) -> Order:
        """The link's order of the chunks; reused memory has buffers for the interleaved one."""
        return self.bounds.chosen_order if self.strategy == "none" else "interleaved"

    @property
    def wanted(self) -> StepTime:
        """The step that would be chosen with this strategy if there were more memory."""
        degrees = replace(self.chooser, budget=None).degrees(self.tokens)
        return self.in_chunks(degrees or self.degrees)

    @property
    def memory_forced(self) -> bool:
        """Whether other degrees would be chosen, without reuse, if there were more memory."""
        if self.strategy != "none":
            return False
        return not self.budget.fits(strategy="none", degrees=self.wanted.degrees)

    @property
    def has_one_chunk(self) -> bool:
        """Whether one chunk each way may be chosen without reuse."""
        phases = self.table.forward, self.table.backward
        return all(1 in seconds for seconds in phases) and self.table.fits((1, 1))

    @property
    def contenders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Degrees of each phase that refits may prefer, the chosen one first."""
        forward, backward = (self.table.contenders(phase, self.degrees) for phase in PHASES)
        return forward, backward

    def in_chunks(self, degrees: Degrees) -> StepTime:
        """Return the step in so many chunks."""
        if max(degrees) == 1:
            return replace(self.sequential, strategy=self.strategy)
        forward, backward = self.table.chooser.times(self.tokens, degrees)
        return StepTime(
            forward=forward,
            backward=backward,
            overhead=self.sequential.overhead,
            strategy=self.strategy,
        )

    def in_one_chunk(self) -> "Ranking":
        """Return the ranking with one chunk each way as its choice, for any number of tokens."""
        bounds = replace(self.bounds, max_degree=1)
        return replace(self, degrees=(1, 1), chooser=replace(self.chooser, bounds=bounds))

    def others(self) -> list[StepTime]:
        """Return the next fastest choices, and one chunk each way wherever that is allowed."""
        steps = list(map(self.in_chunks, self.table.next_best(self.degrees, NUM_ALTERNATIVES)))
        if max(self.degrees) == 1 or not self.has_one_chunk:
            return steps
        several = [step for step in steps if max(step.degrees) > 1]
        others = [*several[: NUM_ALTERNATIVES - 1], self.sequential]
        return sorted(others, key=lambda step: (rounded(step.seconds), *step.degrees))


def rank_degrees(
    *, costs: LayerCosts, bounds: Bounds, budget: MemoryBudget, strategy: Strategy
) -> Ranking | None:
    """Return the best degrees that the bounds and the memory leave with that strategy.

    None where nothing fits, or where a strategy that reuses memory is left with one chunk each
    way, which reuses none, unless the caller pinned it.
    """
    tokens = budget.workload.tokens_per_rank
    chooser = DegreeChooser(costs=costs, bounds=bounds, strategy=strategy, budget=budget)
    table = chooser.table(tokens)
    degrees = table.best()
    if degrees is None and strategy != "none" and bounds.strategy == strategy:
        in_one = replace(bounds, max_degree=1)
        chooser = DegreeChooser(costs=costs, bounds=in_one, budget=budget)
        table = chooser.table(tokens)
        degrees = (1, 1) if table.best() == (1, 1) else None
    if degrees is None:
        return None
    sequential = step_time(
        costs=costs, tokens=tokens, forward_degree=1, backward_degree=1, order=bounds.chosen_order
    )
    return Ranking(
        tokens=tokens, strategy=strategy, costs=costs, bounds=bounds, budget=budget,
        chooser=chooser, table=table, degrees=degrees, sequential=sequential,
    )  # fmt: skip
