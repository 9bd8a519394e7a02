"""A simulated step as a Gantt chart."""

from collections.abc import Sequence

from moetune.domain.samples import ResourceClass
from moetune.domain.units import format_seconds
from moetune.report.operations import CLASSES
from moetune.report.section import Figure, Picture, Value
from moetune.report.theme import axis, figure, note, seconds_scale
from moetune.solve.layer.timeline import Span, Timeline

_COLORS: dict[ResourceClass, str] = {"comp": "@accent", "comm": "@second", "mem": "@third"}
_TEXT: dict[ResourceClass, str] = {"comp": "@surface", "comm": "@surface", "mem": "@ink"}
_DOMAINS = ((0.57, 1.0), (0.0, 0.43))


def timeline_picture(
    *, forward: Timeline, backward: Timeline, title: str = "Timeline of one step"
) -> Picture:
    """Return both phases of a step, one lane a stream, on one scale of time."""
    phases = (("forward", forward), ("backward", backward))
    rows: list[tuple[Value, ...]] = [
        (phase, span.name, CLASSES[span.resource], span.stream, span.start_seconds,
         span.end_seconds)
        for phase, timeline in phases
        for span in timeline.spans
    ]  # fmt: skip
    return Picture(
        name="timeline",
        title=title,
        words=(
            f"The simulated forward pass takes {format_seconds(forward.makespan_seconds)}, the "
            f"backward pass {format_seconds(backward.makespan_seconds)}. D, E and C are a chunk's "
            "dispatch, experts and combine."
        ),
        figure=_chart(phases),
        header=("phase", "span", "class", "stream", "start_seconds", "end_seconds"),
        rows=tuple(rows),
    )


def _chart(phases: Sequence[tuple[str, Timeline]]) -> Figure:
    """Return the figure: one phase above the other."""
    longest = max(timeline.makespan_seconds for _, timeline in phases)
    scale, unit = seconds_scale(longest)
    time = axis(unit, range=[0, 1.02 * longest / scale])
    lane = axis("", autorange="reversed", showgrid=False, fixedrange=True)
    above = {"title": {"text": ""}, "anchor": "y", "matches": "x2", "showticklabels": False}
    return figure(
        [
            trace
            for at, (phase, timeline) in enumerate(phases)
            for trace in _bars(phase, timeline, at, scale)
        ],
        x={**time, **above},
        y={**lane, "domain": list(_DOMAINS[0])},
        xaxis2={**time, "anchor": "y2"},
        yaxis2={**lane, "domain": list(_DOMAINS[1])},
        barmode="overlay",
        bargap=0.25,
        uniformtext={"mode": "hide", "minsize": 9},
        annotations=[
            _phase_note(phase, timeline, domain[1])
            for (phase, timeline), domain in zip(phases, _DOMAINS, strict=True)
        ],
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.04, "yanchor": "bottom"},
    )


def _bars(phase: str, timeline: Timeline, at: int, scale: float) -> list[dict[str, object]]:
    axes = ("x", "y") if at == 0 else ("x2", "y2")
    found = []
    for resource, name in CLASSES.items():
        spans = [span for span in timeline.spans if span.resource == resource]
        if not spans:
            continue
        found.append(
            {
                "type": "bar", "orientation": "h", "name": name, "legendgroup": resource,
                "showlegend": at == 0, "xaxis": axes[0], "yaxis": axes[1],
                "y": [span.stream for span in spans],
                "base": [span.start_seconds / scale for span in spans],
                "x": [_seconds(span) / scale for span in spans],
                "text": [_short(span.name) for span in spans],
                "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
                "textfont": {"size": 11, "color": _TEXT[resource]},
                "marker": {"color": _COLORS[resource], "line": {"color": "@surface", "width": 1}},
                "hovertext": [
                    f"{phase} {span.name}<br>{format_seconds(_seconds(span))}, "
                    f"from {format_seconds(span.start_seconds)}"
                    for span in spans
                ],
                "hoverinfo": "text",
            }
        )  # fmt: skip
    return found


def _seconds(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _short(name: str) -> str:
    """Return "D1" of "dispatch 0"."""
    word, _, number = name.rpartition(" ")
    return f"{word[:1].upper()}{int(number) + 1}" if number.isdecimal() and word else ""


def _phase_note(phase: str, timeline: Timeline, top: float) -> dict[str, object]:
    words = f"{phase} {format_seconds(timeline.makespan_seconds)}"
    return note(
        words, xref="paper", x=0, xanchor="left", yref="paper", y=top, yanchor="bottom",
        font={"size": 12, "color": "@ink", "weight": 600},
    )  # fmt: skip
