"""The figure of a layer's plan: the timeline of its step."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from moetune.domain.samples import ResourceClass
from moetune.domain.units import format_seconds
from moetune.report.figure import Axis, Bar, Figure, Series, seconds_unit
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


def timeline_figure(forward: Timeline, backward: Timeline) -> Figure:
    """Return a figure of both phases of a layer's step, with a lane for each stream."""
    phases = {"forward": forward, "backward": backward}
    longest = max(timeline.makespan_seconds for timeline in phases.values())
    second, unit = seconds_unit(longest)
    took = {name: format_seconds(timeline.makespan_seconds) for name, timeline in phases.items()}
    return Figure(
        name="timeline", title="Timeline of one step",
        words=f"The simulated forward pass takes {took['forward']}, the backward pass "
        f"{took['backward']}. {_letters(forward, backward)}",
        x=Axis(title=unit, end=1.02 * longest / second),
        series=tuple(
            series
            for phase, timeline in phases.items()
            for series in _lanes(phase, timeline, second)
        ),
    )  # fmt: skip


def _lanes(phase: str, timeline: Timeline, second: float) -> Iterator[Series]:
    for resource, name in CLASSES.items():
        spans = [span for span in timeline.spans if span.resource == resource]
        color, text_color = _COLORS[resource]
        bars = tuple(_bar(phase, span, second) for span in spans)
        if bars:
            yield Series(name=name, color=color, text_color=text_color, bars=bars)


def _bar(phase: str, span: Span, second: float) -> Bar:
    seconds, start = span.end_seconds - span.start_seconds, span.start_seconds
    return Bar(
        row=f"{phase} {span.stream}", start=start / second, length=seconds / second,
        text=_short(span.name),
        hover=f"{phase} {shown_name(span.name)}\n{format_seconds(seconds)}, from "
        f"{format_seconds(start)}",
    )  # fmt: skip


def _short(name: str) -> str:
    """Return "D1" for "dispatch 0"; "" for an operation without a chunk."""
    operation, chunk = operation_and_chunk(name)
    return "" if chunk is None else f"{operation[:1].upper()}{chunk + 1}"


def _letters(*timelines: Timeline) -> str:
    names = [operation_and_chunk(span.name) for timeline in timelines for span in timeline.spans]
    operations = dict.fromkeys(
        operation.partition(" ")[0] for operation, chunk in names if chunk is not None
    )
    meanings = ", ".join(
        f"{operation[:1].upper()} {_MEANINGS.get(operation, operation)}" for operation in operations
    )
    return f"Letters with a chunk's number: {meanings}."
