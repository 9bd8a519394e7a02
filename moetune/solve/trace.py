"""A predicted step as a timeline and as a Chrome trace."""

from collections.abc import Sequence

from moetune.domain.costs import Costs
from moetune.domain.layer import Phase
from moetune.domain.plan import Plan, TransformerPlan
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.reuse import reuse_timeline
from moetune.solve.layer.tensor import layer_costs
from moetune.solve.layer.timeline import Span, Timeline, pipeline_tasks, simulate, summing_tasks
from moetune.solve.model.stages import stage_timeline

MICROSECONDS = 1e6


def plan_timelines(*, plan: Plan, costs: Costs, num_nodes: int = 0) -> tuple[Timeline, Timeline]:
    """Return the simulated forward and backward pass of the plan's layer.

    Args:
        plan: any plan for the machine that the costs describe.
        costs: the ones it was solved with, for the times it predicted.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.
    """
    workload = plan.workload
    layer = layer_costs(workload=workload, costs=costs, num_nodes=num_nodes)

    strategy = plan.memory.strategy
    one_chunk = max(plan.pipeline.forward_degree, plan.pipeline.backward_degree) == 1

    def timeline(phase: Phase, degree: int) -> Timeline:
        rows = workload.rows / degree
        if strategy != "none" and not one_chunk:
            return reuse_timeline(
                costs=layer,
                phase=phase,
                strategy=strategy,
                tokens=workload.tokens_per_rank,
                degree=degree,
            )
        transfers = [layer.transfer(rows=rows, degree=degree).seconds] * degree
        experts = [layer.compute(phase=phase, rows=rows).seconds] * degree
        if workload.expert_parallel == "tensor":
            tasks = summing_tasks(
                compute_seconds=experts,
                sum_seconds=transfers,
                gather_seconds=layer.gathering(tokens=workload.tokens_per_rank).seconds,
            )
        else:
            tasks = pipeline_tasks(
                dispatch_seconds=transfers,
                compute_seconds=experts,
                combine_seconds=transfers,
                order=plan.pipeline.order,
            )
        return simulate(tasks, interference=layer.beside(rows=rows, degree=degree))

    return (
        timeline("forward", plan.pipeline.forward_degree),
        timeline("backward", plan.pipeline.backward_degree),
    )


def trace_events(
    *, forward: Timeline, backward: Timeline, process: str = "predicted"
) -> list[dict[str, object]]:
    """Return the step as complete events ("X") of the Chrome trace format, backward last.

    `ts` and `dur` are in microseconds, `tid` is the stream.
    """
    backward_start = forward.makespan_seconds
    return [
        _event(span, name=f"{phase} {span.name}", start_seconds=start, process=process)
        for phase, start, timeline in (
            ("forward", 0.0, forward),
            ("backward", backward_start, backward),
        )
        for span in timeline.spans
    ]


def stage_events(whole: TransformerPlan, *, process: str = "predicted") -> list[dict[str, object]]:
    """Return a whole model's passes and sends, without gradients and optimizer, as such events."""
    found = stage_timeline(whole.stages, num_micro_batches=whole.num_micro_batches)
    return [
        _event(span, name=span.name, start_seconds=0.0, process=process) for span in found.spans
    ]


def _event(span: Span, *, name: str, start_seconds: float, process: str) -> dict[str, object]:
    return {
        "name": name,
        "cat": span.resource,
        "ph": "X",
        "pid": process,
        "tid": span.stream,
        "ts": (start_seconds + span.start_seconds) * MICROSECONDS,
        "dur": (span.end_seconds - span.start_seconds) * MICROSECONDS,
    }


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
