"""Ways to run a plan's layer: strategies with several degrees, each with its time and memory."""

from collections.abc import Iterator, Sequence

from moetune.domain.constraints import Strategy
from moetune.domain.costs import Costs
from moetune.domain.errors import ProfileError
from moetune.domain.plan import Plan
from moetune.report.plan_figures import Option
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time
from moetune.workflows.subjects.layer import LayerSubject

_DEGREES = (1, 2, 4, 8, 16, 32, 64)


def layer_options(subject: LayerSubject, costs: Costs) -> tuple[Option, ...]:
    """Return the plan's choice, and every strategy with 1, 2, 4 … 64 chunks in both phases."""
    plan = subject.plan
    strategies = [one.strategy for one in subject.strategies] or [plan.memory.strategy]
    return tuple(_ways(plan, costs, strategies))


def _ways(plan: Plan, costs: Costs, strategies: Sequence[Strategy]) -> Iterator[Option]:
    """Yield the plan's choice, then the others; in one chunk there is nothing to reuse."""
    workload, pipeline = plan.workload, plan.pipeline
    layer = layer_costs(workload=workload, costs=costs)
    budget = MemoryBudget.of(workload=workload, costs=layer, limit_bytes=0)
    chosen = plan.memory.strategy, pipeline.forward_degree, pipeline.backward_degree
    most = plan.inputs.pinned.bounds.largest(workload.tokens_per_rank)
    ways = [
        (strategy, degree, degree)
        for strategy in strategies
        for degree in _DEGREES
        if degree <= most and (degree > 1 or strategy == "none")
    ]
    for way in dict.fromkeys([chosen, *ways]):
        strategy, forward, backward = way
        try:
            step = step_time(
                costs=layer, tokens=workload.tokens_per_rank, forward_degree=forward,
                backward_degree=backward, order=pipeline.order, strategy=strategy,
            )  # fmt: skip
        except ProfileError:
            continue
        yield Option(
            name=f"strategy {strategy}, {forward} and {backward} chunks",
            group=strategy,
            step_seconds=step.seconds,
            memory_bytes=budget.peak(strategy=strategy, degrees=(forward, backward)).device_bytes,
            is_chosen=way == chosen,
        )
