"""Predictions for an existing plan: its step, its timelines, and what overlaps in them."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from moetune.domain.constraints import Order
from moetune.domain.costs import Costs
from moetune.domain.layer import Phase, Workload
from moetune.domain.operations import Operation, transfer_seconds
from moetune.domain.plan import Decision, Plan
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.reuse import chunk_of, reuse_tasks
from moetune.solve.layer.timeline import COMPUTE, Span, Timeline, simulate
from moetune.solve.layer.times import StepTime, phase_tasks, phase_time, step_time


def plan_step(*, plan: Plan, costs: Costs, decision: Decision | None = None) -> StepTime:
    """Return the predicted step of the plan's layer.

    These are the plan's own times where the costs are those it was solved with.

    Args:
        costs: of the machine.
        decision: other degrees, order and strategy than the plan's own.

    Raises:
        ProfileError: an operation was not measured.
    """
    workload = plan.workload
    own = decision or plan.decide(workload.tokens_per_rank)
    return step_time(
        costs=layer_costs(workload=workload, costs=costs),
        tokens=workload.tokens_per_rank,
        forward_degree=own.forward_degree,
        backward_degree=own.backward_degree,
        order=own.order,
        strategy=own.strategy,
    )


def plan_timelines(*, plan: Plan, costs: Costs) -> tuple[Timeline, Timeline]:
    """Return the simulated forward and backward pass of the plan's layer.

    Args:
        plan: any plan for the machine that the costs describe.
        costs: the ones it was solved with, for the times it predicted.
    """
    pipeline = plan.pipeline
    layer = layer_costs(workload=plan.workload, costs=costs).in_chunks(
        pipeline.forward_degree, pipeline.backward_degree
    )
    return (
        _timeline(plan, layer, "forward", pipeline.forward_degree),
        _timeline(plan, layer, "backward", pipeline.backward_degree),
    )


def _timeline(plan: Plan, layer: LayerCosts, phase: Phase, degree: int) -> Timeline:
    tokens, order = plan.workload.tokens_per_rank, plan.pipeline.order
    rows = layer.rows(tokens, degree=degree)
    strategy = plan.memory.strategy
    if strategy != "none" and max(plan.pipeline.forward_degree, plan.pipeline.backward_degree) > 1:
        chunk = chunk_of(costs=layer, phase=phase, strategy=strategy, rows=rows, degree=degree)
        tasks = reuse_tasks(chunk=chunk, phase=phase, degree=degree)
    else:
        time = phase_time(costs=layer, phase=phase, tokens=tokens, degree=degree, order=order)
        tasks = phase_tasks(time, order)
    return simulate(tasks, interference=layer.interference(rows=rows, degree=degree))


def watched_seconds(
    operation: Operation,
    *,
    workload: Workload,
    costs: LayerCosts,
    order: Order,
) -> float:
    """Return the time that a watched call shows of one of its operations; none is reused memory.

    A watched call times its experts while transfers run beside them, and solves its phase's
    makespan for the transfer. The same is done to a simulated phase here, so that a difference is
    one of the costs, not of the method.

    Raises:
        ProfileError: an operation was not measured.
    """
    degree, tokens = operation.degree, workload.tokens_per_rank
    time = phase_time(costs=costs, phase=operation.phase, tokens=tokens, degree=degree, order=order)
    tasks = phase_tasks(replace(time, gathering=NOTHING), order)
    table = costs.interference(rows=costs.rows(tokens, degree=degree), degree=degree)
    found = simulate(tasks, interference=table)
    compute_seconds = fmean(
        span.end_seconds - span.start_seconds for span in found.spans if span.stream == COMPUTE
    )
    if operation.name == "experts":
        return compute_seconds
    return transfer_seconds(
        workload, degree=degree, phase_seconds=found.makespan_seconds,
        compute_seconds=compute_seconds,
    )  # fmt: skip


def overlap_share(spans: Sequence[Span]) -> float:
    """Return the share of the communication time in which computation runs; 0 without any.

    Source: HTA's definition, time computing while communicating over time communicating.
    """
    comm, comp = _busy(spans, "comm"), _busy(spans, "comp")
    total = sum(end - start for start, end in comm)
    both = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in comm
        for other_start, other_end in comp
    )
    return both / total if total else 0.0


def _busy(spans: Sequence[Span], resource: ResourceClass) -> list[tuple[float, float]]:
    """Return the disjoint intervals in which the class runs."""
    merged: list[tuple[float, float]] = []
    wanted = [span for span in spans if span.resource == resource]
    for span in sorted(wanted, key=lambda one: one.start_seconds):
        if merged and span.start_seconds <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end_seconds)
        else:
            merged.append((span.start_seconds, span.end_seconds))
    return merged
