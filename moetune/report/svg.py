"""Figures as SVG that needs no script: axes, legend and marks, in the theme's colours.

It draws what this package's figures hold, whose names are a few of plotly's, and refuses the rest.
Labels of the y axis stand in a drawing of fixed width; the one beside it takes what is left.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from moetune.report.marks import (
    CHARACTER_PIXELS,
    PHONE_PIXELS,
    SPAN,
    Panel,
    bar_marks,
    line_marks,
    paint,
    percentage,
    pixels,
    point_marks,
    stroke,
    symbol,
    text,
)
from moetune.report.scales import Scale, Tick, scale_of
from moetune.report.section import Figure

_WIDE, _HALF = 960, 440
_HIGH, _LOW = 270, 190
_ROWS = ((6, 36), (12, 26), (10**9, 18))
"""Pixels of a row of bars, by the most rows."""
_ROW_LABELS = 24
"""Characters of a label from which it takes two lines."""
_AXIS, _TITLE, _HEAD = 20, 20, 20
_GAP = 12
_BESIDE_BARS = 0.16
"""Share of the longest bar that its text may take beside it."""


def figure_svg(figure: Figure) -> str:
    """Return a figure's legend and drawing as HTML; its words and title stand around it.

    Raises:
        ValueError: the drawing has a trace that is not drawn here.
    """
    chart = _Chart.of(figure)
    area = "".join((*chart.grid(), *chart.marks(), *chart.notes(), *chart.x_labels()))
    height = pixels(chart.height)
    left = pixels(chart.left)
    y_title = _title_of(chart.layout["yaxis"])
    return (
        f'<div class="plot-head">{_above(y_title)}{_legend(chart.traces)}</div>'
        f'<div class="drawing"><svg class="ends" width="{left}" height="{height}">'
        f"{''.join(chart.y_labels())}</svg>"
        f'<svg class="area" height="{height}">{area}</svg></div>'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """A figure's traces with the panels they stand in.

    Args:
        panels: by the name of the x axis.
        top, height: of the first panel, and of the whole drawing, in pixels.
        left: pixels of the labels of the y axes.
    """

    layout: Mapping[str, Any]
    traces: tuple[dict[str, Any], ...]
    panels: Mapping[str, Panel]
    top: float
    inner: float
    height: float
    left: float

    @classmethod
    def of(cls, figure: Figure) -> "_Chart":
        layout: Any = figure.drawing["layout"]
        data: Any = figure.drawing["data"]
        traces = tuple(data)
        names = ("x", "x2") if "xaxis2" in layout else ("x",)
        scales = {one: _scales(layout, _of_panel(traces, one), one) for one in names}
        heads = any(one.get("yanchor") == "bottom" for one in layout.get("annotations", ()))
        top = _HEAD if heads else _GAP
        inner = _inner_height(figure, layout, scales)
        below = _AXIS + (_TITLE if _title_of(_x_axis(layout)) else 0)
        wide = _WIDE if figure.is_wide else _HALF
        panels = {
            one: _panel(layout, one, scales[one], top=top, inner=inner, pixels=wide)
            for one in names
        }
        labels = [tick.text for one in names for tick in _y_ticks(layout, one, scales[one][1])]
        longest = max((len(line) for one in labels for line in _lines(one)), default=0)
        return cls(
            layout=layout, traces=traces, panels=panels, top=top, inner=inner,
            height=top + inner + below + 2, left=CHARACTER_PIXELS * longest + _GAP,
        )  # fmt: skip

    def grid(self) -> Iterator[str]:
        """Yield the lines of both axes."""
        for name, panel in self.panels.items():
            x_axis, y_axis = self._axis("x", name), self._axis("y", name)
            bottom = panel.top + panel.height
            if y_axis.get("showgrid", True):
                for tick in panel.y.ticks(y_axis):
                    yield _level(panel.top + panel.height * (1 - tick.share), "grid")
            if x_axis.get("showgrid", True):
                for tick in panel.x.ticks(x_axis):
                    yield _upright(tick.share, panel.top, bottom, 'class="grid"')
            if y_axis.get("zeroline") and 0 <= panel.y.share(0.0) <= 1:
                yield _level(panel.down(0.0), "zero")

    def marks(self) -> Iterator[str]:
        """Yield every trace's marks, those of lines in a drawing that is stretched."""
        for name, panel in self.panels.items():
            before: dict[str, Any] | None = None
            starts = _Starts(self.layout.get("barmode", ""))
            for trace in _of_panel(self.traces, name):
                if trace["type"] == "bar":
                    gap = self.layout.get("bargap", 0.2)
                    yield from bar_marks(trace, panel, starts.of(trace), gap)
                elif trace["mode"] == "lines":
                    yield _stretched(line_marks(trace, panel, before), self.height)
                else:
                    yield from point_marks(trace, panel)
                before = trace

    def notes(self) -> Iterator[str]:
        """Yield upright lines and annotations."""
        panel = self.panels["x"]
        bottom = self.top + self.inner
        for shape in self.layout.get("shapes", ()):
            at = panel.left(shape["x0"])
            yield _upright(at, self.top, bottom, stroke(shape["line"]))
        for one in self.layout.get("annotations", ()):
            yield self._note(one, panel)

    def _note(self, one: Mapping[str, Any], panel: Panel) -> str:
        at = one["x"]
        if one.get("xref") != "paper":
            at = panel.left(at)
        is_paper = one.get("yref") == "paper"
        down = self.top + self.inner * (1 - one["y"]) if is_paper else panel.down(one["y"])
        size = one["font"]["size"]
        down += {"bottom": -6, "top": size}.get(one.get("yanchor", ""), size * 0.35)
        anchor = {"left": "start", "right": "end"}.get(one.get("xanchor", ""), "middle")
        shift = {"start": 0, "end": -4}.get(anchor, 0)
        font = one["font"]
        if anchor == "end" and at < len(one["text"]) * CHARACTER_PIXELS / PHONE_PIXELS:
            anchor, shift = "start", 4
        return text(
            one["text"].strip(), at, down, anchor=anchor, color=font["color"],
            size=font["size"], shift=shift, is_bold=font.get("weight") == 600,  # noqa: PLR2004 - CSS's name of semi-bold
        )  # fmt: skip

    def x_labels(self) -> Iterator[str]:
        """Yield the labels and the title of the last panel's x axis."""
        name = "x2" if "x2" in self.panels else "x"
        panel, axis = self.panels[name], self._axis("x", name)
        ticks = panel.x.ticks(axis)
        is_dense = sum(len(one.text) * CHARACTER_PIXELS + 16 for one in ticks) > PHONE_PIXELS
        down = panel.top + panel.height + 15
        for at, tick in enumerate(ticks):
            moves = " roomy" if is_dense and at % 2 else ""
            anchor = "end" if tick.share > 1 - 1e-3 and len(tick.text) > 4 else "middle"  # noqa: PLR2004 - what the edge leaves room for
            yield text(tick.text, tick.share, down, classes=f"tick{moves}", anchor=anchor)
        if words := _title_of(axis):
            yield text(words, 0.5, self.height - 5, classes="tick")

    def y_labels(self) -> Iterator[str]:
        """Yield the labels of the y axes, at the right edge of their drawing."""
        for name, panel in self.panels.items():
            for tick in _y_ticks(self.layout, name, panel.y):
                down = panel.top + panel.height * (1 - tick.share) + 4
                lines = _lines(tick.text)
                for at, line in enumerate(lines):
                    place = down + 14 * (at - (len(lines) - 1) / 2)
                    yield text(line, 1, place, anchor="end", shift=-8, classes="tick")

    def _axis(self, which: str, panel: str) -> Mapping[str, Any]:
        return _axis_of(self.layout, which, panel)


class _Starts:
    """Places where bars begin: their base, or the end of the bar before in a stack."""

    def __init__(self, mode: str) -> None:
        self._is_stack = mode == "stack"
        self._ends: dict[str, float] = {}

    def of(self, trace: Mapping[str, Any]) -> list[float]:
        """Return where the trace's bars begin, and remember their ends."""
        if "base" in trace:
            return list(trace["base"])
        if not self._is_stack:
            return [0.0] * len(trace["x"])
        starts = [self._ends.get(name, 0.0) for name in trace["y"]]
        for name, start, length in zip(trace["y"], starts, trace["x"], strict=True):
            self._ends[name] = start + length
        return starts


def _scales(
    layout: Mapping[str, Any], traces: Sequence[Mapping[str, Any]], panel: str
) -> tuple[Scale, Scale]:
    starts = _Starts(layout.get("barmode", ""))
    along: list[Any] = []
    for trace in traces:
        if trace["type"] == "bar":
            ends = [sum(one) for one in zip(starts.of(trace), trace["x"], strict=True)]
            beside = 1 + _BESIDE_BARS if trace.get("textposition") == "outside" else 1
            along += [0.0, *(beside * one for one in ends)]
        elif trace["type"] == "scatter":
            along += trace["x"]
        else:
            raise ValueError(f"traces of type {trace['type']!r} are not drawn")
    if panel == "x":
        along += [one["x0"] for one in layout.get("shapes", ())]
    across = [one for trace in traces for one in trace["y"]]
    return (
        scale_of(_axis_of(layout, "x", panel), along),
        scale_of(_axis_of(layout, "y", panel), across),
    )


def _panel(
    layout: Mapping[str, Any], name: str, scales: tuple[Scale, Scale], *, top: float, inner: float,
    pixels: float,
) -> Panel:  # fmt: skip
    low, high = _axis_of(layout, "y", name).get("domain", (0.0, 1.0))
    x, y = scales
    return Panel(x=x, y=y, top=top + inner * (1 - high), height=inner * (high - low), pixels=pixels)


def _inner_height(
    figure: Figure, layout: Mapping[str, Any], scales: Mapping[str, tuple[Scale, Scale]]
) -> float:
    """Return the pixels of all panels together: of rows of bars as many as they need."""
    if any(y.kind != "category" for _, y in scales.values()):
        return _LOW if figure.is_low else _HIGH
    needed = 0.0
    for name, (_, y) in scales.items():
        low, high = _axis_of(layout, "y", name).get("domain", (0.0, 1.0))
        rows = len(y.categories)
        row = next(size for most, size in _ROWS if rows <= most)
        needed = max(needed, rows * row / (high - low))
    return needed


def _axis_of(layout: Mapping[str, Any], which: str, panel: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = layout[f"{which}axis{panel[1:]}"]
    return found


def _x_axis(layout: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the x axis whose title is shown: the last panel's."""
    found: Mapping[str, Any] = layout.get("xaxis2", layout["xaxis"])
    return found


def _title_of(axis: Mapping[str, Any]) -> str:
    return str(axis["title"]["text"])


def _y_ticks(layout: Mapping[str, Any], panel: str, scale: Scale) -> tuple[Tick, ...]:
    return scale.ticks(_axis_of(layout, "y", panel))


def _of_panel(traces: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one for one in traces if one.get("xaxis", "x") == name]


def _lines(words: str) -> tuple[str, ...]:
    """Return a label's lines: two where it is long and has a space."""
    if len(words) <= _ROW_LABELS or " " not in words:
        return (words,)
    middle = len(words) / 2
    spaces = [at for at, letter in enumerate(words) if letter == " "]
    at = min(spaces, key=lambda one: abs(one - middle))
    return words[:at], words[at + 1 :]


def _level(down: float, kind: str) -> str:
    return f'<line x1="0" x2="100%" y1="{pixels(down)}" y2="{pixels(down)}" class="{kind}"/>'


def _upright(share: float, top: float, bottom: float, look: str) -> str:
    at = percentage(share)
    return f'<line x1="{at}" x2="{at}" y1="{pixels(top)}" y2="{pixels(bottom)}" {look}/>'


def _stretched(inner: str, height: float) -> str:
    return (
        f'<svg class="lines" width="100%" height="{pixels(height)}" '
        f'viewBox="0 0 {SPAN} {pixels(height)}" preserveAspectRatio="none">{inner}</svg>'
    )


def _above(words: str) -> str:
    return f'<span class="axis">{escape(words)}</span>' if words else ""


def _legend(traces: Sequence[Mapping[str, Any]]) -> str:
    shown = [one for one in traces if one.get("name") and one.get("showlegend", True)]
    if len(shown) < 2:  # noqa: PLR2004 - one series needs no name
        return ""
    items = "".join(
        f'<li><svg width="18" height="12">{_swatch(one)}</svg>{escape(one["name"])}</li>'
        for one in shown
    )
    return f'<ul class="legend">{items}</ul>'


def _swatch(trace: Mapping[str, Any]) -> str:
    if trace["type"] == "bar":
        return f'<rect y="1" width="12" height="10" {paint(trace["marker"]["color"])}/>'
    if "fillcolor" in trace:
        return f'<rect y="1" width="16" height="10" {paint(trace["fillcolor"])}/>'
    if trace["mode"] == "lines":
        return f'<line x1="0" x2="16" y1="6" y2="6" {stroke(trace["line"])}/>'
    return symbol({**trace["marker"], "size": min(trace["marker"].get("size", 6), 9)}, 0.35, 6)
