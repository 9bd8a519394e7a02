"""What a plan that is already made should take: its step, and its timeline."""

from moetune.domain.costs import Costs
from moetune.domain.layer import Phase
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.reuse import chunk_of, reuse_timeline
from moetune.solve.layer.timeline import Timeline, simulate
from moetune.solve.layer.times import StepTime, step_time


def plan_step(
    *, plan: Plan, costs: Costs, decision: Decision | None = None, num_nodes: int = 0
) -> StepTime:
    """Return the predicted step of the plan's layer; in a whole model, of one micro-batch.

    The very times that the plan predicts, where the costs are those it was solved with.

    Args:
        costs: of the machine.
        decision: other degrees, order and strategy than the plan's own.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.

    Raises:
        ProfileError: an operation was not measured.
    """
    workload = plan.workload
    own = decision or plan.decide(workload.tokens_per_rank)
    return step_time(
        costs=layer_costs(workload=workload, costs=costs, num_nodes=num_nodes),
        tokens=workload.tokens_per_rank,
        forward_degree=own.forward_degree,
        backward_degree=own.backward_degree,
        order=own.order,
        strategy=own.strategy,
    )


def plan_timelines(*, plan: Plan, costs: Costs, num_nodes: int = 0) -> tuple[Timeline, Timeline]:
    """Return the simulated forward and backward pass of the plan's layer.

    Args:
        plan: any plan for the machine that the costs describe.
        costs: the ones it was solved with, for the times it predicted.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.
    """
    layer = layer_costs(workload=plan.workload, costs=costs, num_nodes=num_nodes)
    pipeline = plan.pipeline
    return (
        _timeline(plan, layer, "forward", pipeline.forward_degree),
        _timeline(plan, layer, "backward", pipeline.backward_degree),
    )


def _timeline(plan: Plan, layer: LayerCosts, phase: Phase, degree: int) -> Timeline:
    workload, strategy = plan.workload, plan.memory.strategy
    rows = workload.rows / degree
    reuses = max(plan.pipeline.forward_degree, plan.pipeline.backward_degree) > 1
    if strategy != "none" and reuses:
        chunk = chunk_of(costs=layer, phase=phase, strategy=strategy, rows=rows, degree=degree)
        return reuse_timeline(costs=layer, phase=phase, chunk=chunk, rows=rows, degree=degree)
    tasks = layer.tasks(
        transfer_seconds=[layer.transfer(rows=rows, degree=degree).seconds] * degree,
        compute_seconds=[layer.compute(phase=phase, rows=rows).seconds] * degree,
        gather_seconds=layer.gathering(tokens=workload.tokens_per_rank).seconds,
        order=plan.pipeline.order,
    )
    return simulate(tasks, interference=layer.interference(rows=rows, degree=degree))
