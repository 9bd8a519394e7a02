"""The steps and timelines that an existing plan predicts; chunks and micro-batches count from 1."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moetune.domain.costs import Costs
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.domain.samples import ResourceClass
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.peak import middle_elements
from moetune.solve.layer.reuse import chunk_of, reuse_tasks
from moetune.solve.layer.timeline import (
    COMPUTE,
    LINK,
    Span,
    Timeline,
    operation_and_chunk,
    simulate,
)
from moetune.solve.layer.times import StepTime, phase_tasks, phase_time, step_time
from moetune.solve.model.pipeline import StagePipeline, pass_spans
from moetune.solve.model.schedule import PASS_WORDS

"""The transfer of a phase that is no chunk's: the first chunk waits for it."""
_ENDS: tuple[tuple[str, ResourceClass, str], ...] = (
    ("gradients", "comm", LINK), ("optimizer", "comp", COMPUTE), ("between steps", "comp", COMPUTE),
)  # fmt: skip
"""Parts of a step behind its last pass, with their resource and track."""
_MOST_PASSES = 20_000
"""Number of passes that Perfetto still opens."""


class TraceSpan(NamedTuple):
    """A bar of a trace.

    Args:
        track: name of its stream.
        start_seconds, end_seconds: since the step began.
        args: shown when the bar is selected.
    """

    name: str
    resource: ResourceClass
    track: str
    start_seconds: float
    end_seconds: float
    args: Mapping[str, int]


def chunk_span(
    span: Span, *, phase: Phase, chunk: int, tokens: int, degree: int, num_bytes: int | None
) -> TraceSpan:
    """Return the bar of a chunk's operation (chunks from 0), with the bytes of a rank."""
    # Cut as in `moetune.runtime.moe.dispatch`, whose chunks differ by a token.
    first, end = tokens * chunk // degree, tokens * (chunk + 1) // degree
    args = {} if num_bytes is None else {"bytes": num_bytes}
    args |= {"chunk": chunk + 1, "chunks": degree, "tokens": end - first}
    name = f"{phase} {span.name} {chunk + 1}"
    return TraceSpan(name, span.resource, span.stream, span.start_seconds, span.end_seconds, args)


def layer_spans(
    *, plan: Plan, costs: Costs, forward: Timeline, backward: Timeline
) -> list[TraceSpan]:
    """Return the bars of a layer's predicted step, with the bytes of the fullest rank."""
    workload, pipeline = plan.workload, plan.pipeline
    layer, tokens = layer_costs(workload=workload, costs=costs), workload.tokens_per_rank
    spans, start = [], 0.0
    degrees = pipeline.forward_degree, pipeline.backward_degree
    for phase, degree, timeline in zip(PHASES, degrees, (forward, backward), strict=True):
        rows = layer.rows(tokens).item() / degree
        for span in timeline.spans:
            operation, chunk = operation_and_chunk(span.name)
            ends = start + span.start_seconds, start + span.end_seconds
            bar = Span(operation, span.resource, span.stream, *ends)
            num_bytes = _moved_bytes(bar, workload, rows=rows, bytes_per_row=layer.bytes_per_row)
            bar_of_chunk = chunk_span(
                bar, phase=phase, chunk=chunk or 0, tokens=tokens, degree=degree,
                num_bytes=num_bytes,
            )  # fmt: skip
            spans.append(bar_of_chunk)
        start += timeline.makespan_seconds
    return spans


def _moved_bytes(
    span: Span, workload: Workload, *, rows: float, bytes_per_row: float
) -> int | None:
    """Return the bytes that a chunk's transfer or copy moves; None for a computation."""
    if span.resource == "comp":
        return None
    if span.resource == "comm":
        return round(rows * bytes_per_row)
    layer = workload.layer
    width = layer.d_model if span.name.endswith("input") else middle_elements(layer)
    return round(rows * width * dtype_bytes(workload.dtype))


def num_drawn(pipeline: StagePipeline) -> int:
    """Return the micro-batches that a trace draws: all, or whole rounds of ranks and a rest."""
    num, pp = pipeline.num_micro_batches, pipeline.pp
    rounds = _MOST_PASSES // (2 * len(pipeline.stages)) // pp
    return min(num, max(1, rounds) * pp + num % pp)


def rank_spans(
    pipeline: StagePipeline, parts: Mapping[str, float], num_micro_batches: int, *, tokens: int
) -> list[list[TraceSpan]]:
    """Return the bars of each pipeline rank: its passes, and the end of the step after them.

    Args:
        parts: seconds of the step by part; gradients, optimizer and host follow the last pass.
        num_micro_batches: micro-batches to draw; without the last of them there is no end.
        tokens: of a micro-batch on one rank.
    """
    spans: list[list[TraceSpan]] = [[] for _ in range(pipeline.pp)]
    passes = pass_spans(pipeline, num_micro_batches)
    for span in passes:
        args = {"micro_batch": span.batch + 1, "stage": span.stage + 1, "tokens": tokens}
        name = f"{PASS_WORDS[span.kind]} {span.batch + 1}"
        bar = TraceSpan(name, "comp", COMPUTE, span.start_seconds, span.end_seconds, args)
        spans[span.rank].append(bar)
    if num_micro_batches < pipeline.num_micro_batches:
        return spans
    start = max(span.end_seconds for span in passes)
    for name, kind, line in _ENDS:
        if name in parts:
            end = start + parts[name]
            for rank in spans:
                rank.append(TraceSpan(name, kind, line, start, end, {}))
            start = end
    return spans


def plan_step(*, plan: Plan, costs: Costs, decision: Decision | None = None) -> StepTime:
    """Return a plan's predicted step, or a decision's; may raise InputError or ProfileError."""
    workload = plan.workload
    chosen = decision or plan.decide(workload.tokens_per_rank)
    return step_time(
        costs=layer_costs(workload=workload, costs=costs),
        tokens=workload.tokens_per_rank,
        degree=chosen.degree,
        order=chosen.order,
        strategy=chosen.strategy,
    )


def plan_timelines(*, plan: Plan, costs: Costs) -> tuple[Timeline, Timeline]:
    """Return the simulated forward and backward pass of the plan's layer."""
    layer = layer_costs(workload=plan.workload, costs=costs)
    pipeline = plan.pipeline
    forward = _timeline(plan, layer, "forward", pipeline.forward_degree)
    return forward, _timeline(plan, layer, "backward", pipeline.backward_degree)


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
    return simulate(tasks, speeds=layer.speeds(rows=rows, degree=degree))


def overlap_share(spans: Sequence[Span]) -> float:
    """Return the share of communication time that overlaps computation; 0 without communication.

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
    for span in sorted(wanted, key=lambda span: span.start_seconds):
        if merged and span.start_seconds <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end_seconds)
        else:
            merged.append((span.start_seconds, span.end_seconds))
    return merged
