"""The figure of a layer's plan: the timeline of its step."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moetune.domain.samples import ResourceClass
from moetune.domain.units import format_seconds
from moetune.report.axes import ROWS, Axis, seconds_unit
from moetune.report.marks import Bars, Panel
from moetune.report.section import Figure
from moetune.solve.layer.timeline import Span, Timeline, operation_and_chunk, shown_name

CLASSES: Mapping[ResourceClass, str] = MappingProxyType({
    "comp": "computation", "comm": "communication", "mem": "copies",
})  # fmt: skip
"""Names of resources."""
_COLORS: dict[ResourceClass, tuple[str, str]] = {
    "comp": ("accent", "surface"), "comm": ("second", "surface"), "mem": ("third", "ink"),
}  # fmt: skip
"""Colours of bars and of the text in them."""
_MEANINGS = {
    "before": "first half of the experts", "after": "second half", "sum": "sum of the outputs",
    "save": "copy to the host", "load": "copy back", "weights": "combine weights",
}  # fmt: skip
"""Meaning of an operation's first word, where the word does not say it."""


def timeline_figure(*, forward: Timeline, backward: Timeline) -> Figure:
    """Return both phases of a layer's step, one lane per stream, on the same time scale."""
    phases = {"forward": forward, "backward": backward}
    longest = max(timeline.makespan_seconds for timeline in phases.values())
    second, unit = seconds_unit(longest)
    return Figure(
        name="timeline",
        title="Timeline of one step",
        words=(
            f"The simulated forward pass takes {format_seconds(forward.makespan_seconds)}, the "
            f"backward pass {format_seconds(backward.makespan_seconds)}. "
            f"{_letters(forward, backward)}"
        ),
        panels=tuple(
            Panel(
                title=f"{phase} {format_seconds(timeline.makespan_seconds)}",
                x=Axis(title=unit, end=1.02 * longest / second),
                y=ROWS,
                marks=tuple(_bars(phase, timeline, second)),
            )
            for phase, timeline in phases.items()
        ),
    )


def _bars(phase: str, timeline: Timeline, second: float) -> Iterator[Bars]:
    """Yield the bars of each class of resources."""
    for resource, name in CLASSES.items():
        spans = [span for span in timeline.spans if span.resource == resource]
        color, text_color = _COLORS[resource]
        if spans:
            yield Bars(
                name=name, color=color, text_color=text_color,
                rows=tuple(span.stream for span in spans),
                starts=tuple(span.start_seconds / second for span in spans),
                lengths=tuple(_seconds(span) / second for span in spans),
                texts=tuple(_short(span.name) for span in spans),
                hover=tuple(
                    f"{phase} {shown_name(span.name)}\n{format_seconds(_seconds(span))}, "
                    f"from {format_seconds(span.start_seconds)}"
                    for span in spans
                ),
            )  # fmt: skip


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _short(name: str) -> str:
    """Return "D1" of "dispatch 0"; "" of what is no chunk's."""
    operation, chunk = operation_and_chunk(name)
    return "" if chunk is None else f"{operation[:1].upper()}{chunk + 1}"


def _letters(*timelines: Timeline) -> str:
    """Return what the bars' letters stand for, in the order that they appear."""
    names = [operation_and_chunk(span.name) for timeline in timelines for span in timeline.spans]
    operations = dict.fromkeys(
        operation.partition(" ")[0] for operation, chunk in names if chunk is not None
    )
    meanings = ", ".join(
        f"{operation[:1].upper()} {_MEANINGS.get(operation, operation)}" for operation in operations
    )
    return f"Letters with a chunk's number: {meanings}."
