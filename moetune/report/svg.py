"""Figures as SVG that needs no script, in the theme's colours.

Heights are in pixels, and widths are shares of the figure. The figure fills the width that it is
given, while texts and lines keep their size. Labels at the left stand in a drawing of fixed width;
the area next to it takes the rest.
"""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from moetune.report.figure import ROLES, Figure, Scale, Series

STATIC = Path(__file__).resolve().parent / "static"
_CHARACTER, _IN_BARS = 7.0, 6.6
"""Widths of a character of 12 pixels height in wide fonts, and of a smaller character in a bar."""
_PHONE, _WIDE = 250, 960
"""Pixels of an area on a phone and in the widest window, to know which texts have room."""
_TOP, _HEIGHT, _ROW, _BAR = 12, 190, 36, 27
"""Pixels above an area, and heights of an area with points, of a row, and of a row's bar."""
_TICKS, _TITLE = 22, 20

_Place: TypeAlias = tuple[float, float]
"""A share of the width, and pixels from the top."""


class Drawing(NamedTuple):
    """The inner SVG of a figure.

    Args:
        left: width of the labels in pixels; the area begins to their right.
        area: SVG of any width, in which places are shares of the width.
        legend: SVG of each series by its name; empty for a single series.
    """

    left: float
    height: float
    labels: str
    area: str
    legend: dict[str, str]


def figure_svg(figure: Figure) -> str:
    """Return a figure's legend and drawing as HTML; raise as `drawing_of` does."""
    drawing = drawing_of(figure)
    above = f'<span class="axis">{escape(figure.y.title)}</span>' if figure.y else ""
    items = "".join(
        f'<li><svg width="18" height="12">{swatch}</svg>{escape(name)}</li>'
        for name, swatch in drawing.legend.items()
    )
    named = f'<ul class="legend">{items}</ul>' if items else ""
    return (
        f'<div class="plot-head">{above}{named}</div><div class="drawing">'
        f'<svg class="ends" width="{drawing.left:g}" height="{drawing.height:g}">{drawing.labels}'
        f'</svg><svg class="area" height="{drawing.height:g}">{drawing.area}</svg></div>'
    )


def drawing_of(figure: Figure) -> Drawing:
    """Return a figure's drawing; raise ValueError if a colour is no role of the theme."""
    points = [point for series in figure.series for point in series.points]
    rows = [*dict.fromkeys(bar.row for series in figure.series for bar in series.bars)]
    x, bottom = Scale.of(figure.x, [point.x for point in points]), _TOP + _ROW * len(rows)
    labels = {row: _TOP + _ROW * (number + 0.5) for number, row in enumerate(rows)}
    grid, drawn = "", [_bars(series, x, labels) for series in figure.series]
    if figure.y is not None:
        y, bottom = Scale.of(figure.y, [point.y for point in points]), _TOP + _HEIGHT
        labels = {tick.text: bottom - _HEIGHT * tick.share for tick in y.ticks()}
        grid = "".join(_segment((0, down), (1, down), 'class="grid"') for down in labels.values())
        drawn = [_points(series, x, y) for series in figure.series]
    grid += "".join(
        _segment((tick.share, _TOP), (tick.share, bottom), 'class="grid"') for tick in x.ticks()
    )
    legend = {series.name: _swatch(series) for series in figure.series if series.name}
    return Drawing(
        left=_CHARACTER * max(map(len, labels), default=0) + _TOP,
        height=bottom + _TICKS + (_TITLE if figure.x.title else 0),
        labels="".join(
            _text(words, 1, down + 4, 'text-anchor="end" class="tick" dx="-8"')
            for words, down in labels.items()
        ),
        area=grid + "".join(drawn) + "".join(_x_labels(figure, x, bottom)),
        legend=legend if len(legend) > 1 else {},
    )


def _bars(series: Series, x: Scale, middles: Mapping[str, float]) -> str:
    drawn, look = "", f"{_paint(series.color)} {_paint('surface', 'stroke')}"
    for bar in series.bars:
        left, middle = x.share(bar.start), middles[bar.row]
        width = x.share(bar.start + bar.length) - left
        drawn += (
            f'<rect x="{left:.2%}" y="{middle - _BAR / 2:.1f}" width="{width:.2%}" '
            f'height="{_BAR}" {look}>{_title(bar.hover)}</rect>'
        )
        needs = len(bar.text) * _IN_BARS + 2
        if bar.text and width * _WIDE >= needs:
            mark = "mark" if width * _PHONE >= needs else "mark roomy"
            more = f'text-anchor="middle" class="{mark}" {_paint(series.text_color)}'
            drawn += _text(bar.text, left + width / 2, middle + 4, more)
    return drawn


def _points(series: Series, x: Scale, y: Scale) -> str:
    places = [
        (x.share(point.x), _TOP + _HEIGHT * (1 - y.share(point.y))) for point in series.points
    ]
    if not series.size:
        look = f'{_paint(series.color, "stroke")} stroke-width="2"'
        return "".join(_segment(*ends, look) for ends in pairwise(places))
    return "".join(
        _circle(series, place, _title(point.hover))
        for place, point in zip(places, series.points, strict=True)
    )


def _x_labels(figure: Figure, x: Scale, bottom: float) -> Iterator[str]:
    """Yield the x axis's labels and title; if labels are dense, a phone omits every second."""
    ticks = [*x.ticks()]
    is_dense = sum(len(tick.text) * _CHARACTER + 16 for tick in ticks) > _PHONE
    for number, tick in enumerate(ticks):
        look = "tick roomy" if is_dense and number % 2 else "tick"
        yield _text(tick.text, tick.share, bottom + 15, f'text-anchor="middle" class="{look}"')
    if title := figure.x.title:
        yield _text(title, 0.5, bottom + _TICKS + 15, 'text-anchor="middle" class="tick"')


def _swatch(series: Series) -> str:
    if series.size:
        return _circle(series, (0.35, 6))
    height = 10 if series.bars else 2
    return f'<rect y="{6 - height / 2:g}" width="14" height="{height}" {_paint(series.color)}/>'


def _circle(series: Series, place: _Place, inner: str = "") -> str:
    spot = f'cx="{place[0]:.2%}" cy="{place[1]:.1f}" r="{series.size / 2:g}"'
    return f"<circle {spot} {_paint(series.color)}>{inner}</circle>"


def _segment(start: _Place, end: _Place, look: str) -> str:
    x, y = f'x1="{start[0]:.2%}" x2="{end[0]:.2%}"', f'y1="{start[1]:.1f}" y2="{end[1]:.1f}"'
    return f"<line {x} {y} {look}/>"


def _text(words: str, x: float, y: float, look: str) -> str:
    return f'<text x="{x:.2%}" y="{y:.1f}" {look}>{escape(words)}</text>'


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _paint(color: str, name: str = "fill") -> str:
    role, _, opacity = color.partition("/")
    if role not in ROLES:
        raise ValueError(f"{color!r} is no role of the theme, such as accent or accent/0.2")
    return f'{name}="var(--{role})"' + (f' {name}-opacity="{opacity}"' if opacity else "")
