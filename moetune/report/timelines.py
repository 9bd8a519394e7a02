"""Gantt charts of a simulated step: of a layer's streams, or of a model's pipeline stages."""

from collections.abc import Sequence

from moetune.domain.samples import ResourceClass
from moetune.domain.units import format_seconds
from moetune.report.operations import CLASSES
from moetune.report.section import Drawing, Figure, Value
from moetune.report.theme import axis, drawing, note, seconds_scale
from moetune.solve.layer.timeline import Span, Timeline, operation_and_chunk, shown_name
from moetune.solve.training.pipeline import PassSpan
from moetune.solve.training.schedule import PASS_WORDS

_COLORS: dict[ResourceClass, str] = {"comp": "@accent", "comm": "@second", "mem": "@third"}
_TEXT: dict[ResourceClass, str] = {"comp": "@surface", "comm": "@surface", "mem": "@ink"}
_MEANINGS = {
    "before": "first half of the experts", "after": "second half", "sum": "sum of the outputs",
    "save": "copy to the host", "load": "copy back",
}  # fmt: skip
"""Of an operation's first word, where that alone does not say it."""
_DOMAINS = ((0.57, 1.0), (0.0, 0.43))


def timeline_figure(
    *,
    forward: Timeline,
    backward: Timeline,
    title: str = "Timeline of one step",
) -> Figure:
    """Return both phases of a layer's step, one lane per stream, on the same time scale."""
    phases = (("forward", forward), ("backward", backward))
    rows: list[tuple[Value, ...]] = [
        (phase, shown_name(span.name), CLASSES[span.resource], span.stream, span.start_seconds,
         span.end_seconds)
        for phase, timeline in phases
        for span in timeline.spans
    ]  # fmt: skip
    return Figure(
        name="timeline",
        title=title,
        words=(
            f"The simulated forward pass takes {format_seconds(forward.makespan_seconds)}, the "
            f"backward pass {format_seconds(backward.makespan_seconds)}. "
            f"{_letters(forward, backward)}"
        ),
        drawing=_chart(phases),
        is_wide=True,
        header=("phase", "span", "class", "stream", "start_seconds", "end_seconds"),
        rows=tuple(rows),
    )


def _chart(phases: Sequence[tuple[str, Timeline]]) -> Drawing:
    """Return the drawing, with one phase above the other."""
    longest = max(timeline.makespan_seconds for _, timeline in phases)
    scale, unit = seconds_scale(longest)
    time = axis(unit, range=[0, 1.02 * longest / scale])
    lane = axis("", autorange="reversed", showgrid=False)
    return drawing(
        [
            trace
            for at, (phase, timeline) in enumerate(phases)
            for trace in _bars(phase, timeline, at, scale)
        ],
        x={**time, "title": {"text": ""}},
        y={**lane, "domain": list(_DOMAINS[0])},
        xaxis2=time,
        yaxis2={**lane, "domain": list(_DOMAINS[1])},
        barmode="overlay",
        bargap=0.25,
        annotations=[
            _phase_note(phase, timeline, domain[1])
            for (phase, timeline), domain in zip(phases, _DOMAINS, strict=True)
        ],
    )


def _bars(phase: str, timeline: Timeline, at: int, scale: float) -> list[dict[str, object]]:
    found = []
    for resource, name in CLASSES.items():
        spans = [span for span in timeline.spans if span.resource == resource]
        if not spans:
            continue
        found.append(
            {
                "type": "bar", "name": name,
                "showlegend": at == 0, "xaxis": ("x", "x2")[at],
                "y": [span.stream for span in spans],
                "base": [span.start_seconds / scale for span in spans],
                "x": [_seconds(span) / scale for span in spans],
                "text": [_short(span.name) for span in spans],
                "textposition": "inside",
                "textfont": {"size": 11, "color": _TEXT[resource]},
                "marker": {"color": _COLORS[resource], "line": {"color": "@surface", "width": 1}},
                "hovertext": [
                    f"{phase} {shown_name(span.name)}\n{format_seconds(_seconds(span))}, "
                    f"from {format_seconds(span.start_seconds)}"
                    for span in spans
                ],
            }
        )  # fmt: skip
    return found


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _short(name: str) -> str:
    """Return "D1" of "dispatch 0"; "" of what is no chunk's."""
    operation, chunk = operation_and_chunk(name)
    return "" if chunk is None else f"{operation[:1].upper()}{chunk + 1}"


def _letters(*timelines: Timeline) -> str:
    """Return what the bars' letters stand for, in the order that they appear."""
    names = [operation_and_chunk(span.name) for one in timelines for span in one.spans]
    operations = dict.fromkeys(
        operation.partition(" ")[0] for operation, chunk in names if chunk is not None
    )
    meanings = ", ".join(f"{one[:1].upper()} {_MEANINGS.get(one, one)}" for one in operations)
    return f"Letters with a chunk's number: {meanings}."


def _phase_note(phase: str, timeline: Timeline, top: float) -> dict[str, object]:
    words = f"{phase} {format_seconds(timeline.makespan_seconds)}"
    return note(
        words, xref="paper", x=0, xanchor="left", yref="paper", y=top, yanchor="bottom",
        font={"size": 12, "color": "@ink", "weight": 600},
    )  # fmt: skip


_PASS_COLORS = {
    PASS_WORDS["F"]: "@accent", PASS_WORDS["B"]: "@second", PASS_WORDS["I"]: "@second",
    PASS_WORDS["W"]: "@third",
}  # fmt: skip


def passes_figure(passes: Sequence[PassSpan], *, words: str) -> Figure:
    """Return the passes of each pipeline rank on one time scale, with their micro-batches."""
    spans = [
        Span(
            f"{PASS_WORDS[one.kind]} {one.batch + 1}", "comp", f"rank {one.rank}",
            one.start_seconds, one.end_seconds,
        )
        for one in sorted(passes, key=lambda span: (span.rank, span.start_seconds))
    ]  # fmt: skip
    return Figure(
        name="stages",
        title="Pipeline",
        words=words,
        drawing=_stage_chart(spans, max(span.end_seconds for span in spans)),
        is_wide=True,
        header=("rank", "pass", "start_seconds", "end_seconds"),
        rows=tuple(
            (span.stream, span.name, span.start_seconds, span.end_seconds) for span in spans
        ),
    )


def _stage_chart(spans: Sequence[Span], makespan_seconds: float) -> Drawing:
    scale, unit = seconds_scale(makespan_seconds)
    return drawing(
        [trace for kind in _PASS_COLORS if (trace := _pass_bars(kind, spans, scale))],
        x=axis(unit, range=[0, 1.01 * makespan_seconds / scale]),
        y=axis("", autorange="reversed", showgrid=False),
        barmode="overlay",
        bargap=0.25,
    )


def _pass_bars(kind: str, spans: Sequence[Span], scale: float) -> dict[str, object] | None:
    some = [
        span for span in spans if _split(span)[0] == kind and span.end_seconds > span.start_seconds
    ]
    if not some:
        return None
    seconds = [span.end_seconds - span.start_seconds for span in some]
    return {
        "type": "bar", "name": kind,
        "y": [span.stream for span in some],
        "base": [span.start_seconds / scale for span in some],
        "x": [one / scale for one in seconds],
        "text": [_split(span)[1] for span in some],
        "textposition": "inside",
        "textfont": {"size": 10, "color": "@ink" if kind == PASS_WORDS["W"] else "@surface"},
        "marker": {"color": _PASS_COLORS[kind], "line": {"color": "@surface", "width": 1}},
        "hovertext": [
            f"{span.stream}, {span.name}\n{format_seconds(one)}, "
            f"from {format_seconds(span.start_seconds)}"
            for span, one in zip(some, seconds, strict=True)
        ],
    }  # fmt: skip


def _split(span: Span) -> tuple[str, str]:
    kind = next(kind for kind in _PASS_COLORS if span.name.startswith(kind))
    return kind, span.name[len(kind) + 1 :]
