"""A whole model's step as a Gantt chart of its pipeline stages."""

from collections.abc import Sequence

from moetune.domain.plan import StageTime
from moetune.domain.units import format_seconds
from moetune.report.section import Figure, Picture
from moetune.report.theme import axis, figure, seconds_scale
from moetune.solve.layer.timeline import Span
from moetune.solve.model.stages import BACKWARD, FORWARD, SEND, stage_timeline

_MOST_PASSES = 600
"""Bars that a reader, and a browser, can still tell apart."""
_COLORS = {FORWARD: "@accent", BACKWARD: "@second", SEND: "@third"}
_TEXT = {FORWARD: "@surface", BACKWARD: "@surface", SEND: "@ink"}


def stages_picture(stages: Sequence[StageTime], *, num_micro_batches: int) -> Picture:
    """Return the stages' passes on one scale of time; of many micro-batches the first ones."""
    shown = min(num_micro_batches, max(_MOST_PASSES // (2 * len(stages)), 2 * len(stages)))
    found = stage_timeline(stages, num_micro_batches=shown)
    which = (
        f"the first {shown} of {num_micro_batches} micro-batches"
        if shown < num_micro_batches
        else f"{shown} micro-batches"
    )
    idle = 1 - _busy_seconds(found.spans) / (len(stages) * found.makespan_seconds)
    return Picture(
        name="stages",
        title="Pipeline of one step",
        words=(
            f"The simulated way of {which} through {len(stages)} stages takes "
            f"{format_seconds(found.makespan_seconds)}, and stages wait or send for {idle:.0%} of "
            "it. Numbers are micro-batches."
        ),
        figure=_chart(found.spans, found.makespan_seconds),
        header=("stage", "span", "start_seconds", "end_seconds"),
        rows=tuple(
            (span.stream, span.name, span.start_seconds, span.end_seconds) for span in found.spans
        ),
    )


def _busy_seconds(spans: Sequence[Span]) -> float:
    return sum(one.end_seconds - one.start_seconds for one in spans if one.resource == "comp")


def _chart(spans: Sequence[Span], makespan_seconds: float) -> Figure:
    scale, unit = seconds_scale(makespan_seconds)
    return figure(
        [trace for kind in _COLORS if (trace := _bars(kind, spans, scale))],
        x=axis(unit, range=[0, 1.01 * makespan_seconds / scale]),
        y=axis("", autorange="reversed", showgrid=False, fixedrange=True),
        barmode="overlay",
        bargap=0.25,
        uniformtext={"mode": "hide", "minsize": 8},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.04, "yanchor": "bottom"},
    )


def _bars(kind: str, spans: Sequence[Span], scale: float) -> dict[str, object] | None:
    some = [
        span for span in spans if _split(span)[0] == kind and span.end_seconds > span.start_seconds
    ]
    if not some:
        return None
    seconds = [span.end_seconds - span.start_seconds for span in some]
    return {
        "type": "bar", "orientation": "h", "name": kind,
        "y": [span.stream for span in some],
        "base": [span.start_seconds / scale for span in some],
        "x": [one / scale for one in seconds],
        "text": ["" if kind == SEND else _split(span)[1] for span in some],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "textfont": {"size": 10, "color": _TEXT[kind]},
        "marker": {"color": _COLORS[kind], "line": {"color": "@surface", "width": 1}},
        "hovertext": [
            f"{span.stream}, {span.name}<br>{format_seconds(one)}, "
            f"from {format_seconds(span.start_seconds)}"
            for span, one in zip(some, seconds, strict=True)
        ],
        "hoverinfo": "text",
    }  # fmt: skip


def _split(span: Span) -> tuple[str, str]:
    kind, _, batch = span.name.partition(" ")
    return kind, batch
