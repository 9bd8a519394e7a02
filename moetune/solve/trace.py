"""Timelines as a Chrome trace, and how much of their communication computation overlaps."""

from collections.abc import Sequence

from moetune.domain.plan import TransformerPlan
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.timeline import Span, Timeline
from moetune.solve.model.stages import stage_timeline

MICROSECONDS = 1e6


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
