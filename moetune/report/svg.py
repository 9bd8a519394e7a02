"""Figures as SVG that needs no script: axes, legend and marks, in the theme's colours.

Heights are in pixels, widths in shares of the figure: it fills whatever width it is given, and its
texts and lines keep their size. Lines stand in an inner drawing of `SPAN` units that is stretched
with the figure, everything else at a percentage. Labels of the y axis stand in a drawing of fixed
width; the one beside it takes what is left.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from moetune.report.axes import Scale, Value
from moetune.report.marks import (
    ROLES,
    Bars,
    Line,
    Mark,
    Panel,
    Points,
    Values,
    across,
    along,
)
from moetune.report.section import Figure

SPAN = 1000
"""Width of the drawing that lines stand in."""
_CHARACTER = 7.0
"""Width of a character of 12 pixels height, in wide fonts."""
_IN_BARS = 0.6 * 11
"""Width of a character in a bar."""
_PHONE = 250
"""Width of a drawing on a phone."""
_WIDE = 960
"""Pixels of a figure in the widest window, to know which texts fit into bars."""
_HEIGHT = 190
_ROW = 36
"""Pixels of a row of bars."""
_FREE = 0.25
"""Share of a row between its bar and the next."""
_TICKS, _TITLE, _HEAD, _GAP = 20, 20, 20, 12
_LONG_TICK = 4
_ROLE = re.compile(rf"({'|'.join(ROLES)})(?:/([\d.]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A panel in its figure, from `top` pixels on."""

    panel: Panel
    x: Scale
    y: Scale
    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def down(self, value: Value) -> float:
        """Return the pixels above a value."""
        return self.top + self.height * (1 - self.y.share(value))


def figure_svg(figure: Figure) -> str:
    """Return a figure's legend and drawing as HTML; its words and title stand around it.

    Raises:
        ValueError: a colour is no role of the theme.
    """
    drawing = drawing_of(figure)
    title = figure.panels[0].y.title
    above = f'<span class="axis">{escape(title)}</span>' if title else ""
    items = "".join(
        f'<li><svg width="18" height="12">{swatch}</svg>{escape(name)}</li>'
        for name, swatch in legend(figure).items()
    )
    named = f'<ul class="legend">{items}</ul>' if items else ""
    left, height = _px(drawing.left), _px(drawing.height)
    return (
        f'<div class="plot-head">{above}{named}</div>'
        f'<div class="drawing"><svg class="ends" width="{left}" height="{height}">'
        f'{drawing.labels}</svg><svg class="area" height="{height}">{drawing.area}</svg></div>'
    )


class Drawing(NamedTuple):
    """The inner SVG of a figure.

    Args:
        left: pixels of the labels of the y axis, at whose right the area begins.
        area: of any width; its places are shares of it.
    """

    left: float
    height: float
    labels: str
    area: str


def drawing_of(figure: Figure) -> Drawing:
    """Return a figure's drawing without its legend.

    Raises:
        ValueError: a colour is no role of the theme.
    """
    places = list(_places(figure))
    last = places[-1]
    height = last.bottom + _TICKS + (_TITLE if last.panel.x.title else 0) + 2
    labels = [tick.text for place in places for tick in place.y.ticks()]
    left = _CHARACTER * max(map(len, labels), default=0) + _GAP
    y_labels = "".join(part for place in places for part in _y_labels(place))
    area = "".join(part for place in places for part in (*_grid(place), *_marks(place, height)))
    return Drawing(left, height, y_labels, area + "".join(_x_labels(last, height)))


def _places(figure: Figure) -> Iterator[_Place]:
    """Yield the panels, each below the one before."""
    top = 0.0
    for panel in figure.panels:
        x = Scale.of(panel.x, [value for mark in panel.marks for value in along(mark)])
        y = Scale.of(panel.y, [value for mark in panel.marks for value in across(mark)])
        height = _ROW * len(y.categories)
        place = _Place(
            panel=panel, x=x, y=y, top=top + (_HEAD if panel.title else _GAP),
            height=height or _HEIGHT,
        )  # fmt: skip
        yield place
        top = place.bottom


def _grid(place: _Place) -> Iterator[str]:
    """Yield the title and the lines of both axes; rows have none."""
    if place.panel.title:
        yield _text(place.panel.title, 0, place.top - 6, look="head", anchor="start")
    if not place.y.categories:
        for tick in place.y.ticks():
            down = _px(place.bottom - place.height * tick.share)
            yield f'<line x1="0" x2="100%" y1="{down}" y2="{down}" class="grid"/>'
    for tick in place.x.ticks():
        yield _vertical(tick.share, place, 'class="grid"')


def _marks(place: _Place, height: float) -> Iterator[str]:
    for mark in place.panel.marks:
        match mark:
            case Line():
                yield _stretch(_line(mark, place), height)
            case Points():
                for number, (x, y) in enumerate(zip(mark.x, mark.y, strict=True)):
                    hover = _title(mark.hover, number)
                    yield _symbol(mark, mark.size, (place.x.share(x), place.down(y)), hover)
            case Bars():
                yield from _bars(mark, place)


def _line(line: Line, place: _Place) -> str:
    points = _path(_points(line.x, line.y, place))
    return f'<path class="line" d="{points}" {_stroke(line)}/>'


def _points(x: Values, y: Values, place: _Place) -> list[tuple[float, float]]:
    pairs = zip(x, y, strict=True)
    return [(SPAN * place.x.share(right), place.down(up)) for right, up in pairs]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points)


def _symbol(points: Points, size: float, place: tuple[float, float], inner: str = "") -> str:
    """Return one point at a share of the width and a height in pixels."""
    x, y = place
    look = _paint(points.color)
    circle = f'cx="{_percent(x)}" cy="{_px(y)}" r="{size / 2:g}"'
    return f"<circle {circle} {look}>{inner}</circle>"


def _bars(bars: Bars, place: _Place) -> Iterator[str]:
    """Yield bars, and the texts in them."""
    thick = place.height / len(place.y.categories) * (1 - _FREE)
    look = f"{_paint(bars.color)} {_paint('surface', 'stroke')}"
    spans = zip(bars.rows, bars.starts, bars.lengths, strict=True)
    for number, (row, start, length) in enumerate(spans):
        left, right = place.x.share(start), place.x.share(start + length)
        middle = place.down(row)
        yield (
            f'<rect x="{_percent(left)}" y="{_px(middle - thick / 2)}" '
            f'width="{_percent(right - left)}" height="{_px(thick)}" {look}>'
            f"{_title(bars.hover, number)}</rect>"
        )
        if bars.texts:
            needs = len(bars.texts[number]) * _IN_BARS + 2
            if bars.texts[number] and (right - left) * _WIDE >= needs:
                look_in = "mark" if (right - left) * _PHONE >= needs else "mark roomy"
                center = (left + right) / 2
                yield _text(
                    bars.texts[number], center, middle + 4, look=look_in, color=bars.text_color
                )


def _x_labels(place: _Place, height: float) -> Iterator[str]:
    """Yield the labels and the title of a panel's x axis."""
    ticks = place.x.ticks()
    is_dense = sum(len(tick.text) * _CHARACTER + 16 for tick in ticks) > _PHONE
    for number, tick in enumerate(ticks):
        anchor = "end" if tick.share > 1 - 1e-3 and len(tick.text) > _LONG_TICK else "middle"
        look = "tick roomy" if is_dense and number % 2 else "tick"
        yield _text(tick.text, tick.share, place.bottom + 15, look=look, anchor=anchor)
    if title := place.panel.x.title:
        yield _text(title, 0.5, height - 5)


def _y_labels(place: _Place) -> Iterator[str]:
    """Yield the labels of a panel's y axis, at the right edge of their drawing."""
    for tick in place.y.ticks():
        down = place.bottom - place.height * tick.share + 4
        yield _text(tick.text, 1, down, anchor="end", shift=-8)


def legend(figure: Figure) -> dict[str, str]:
    """Return the SVG of each series by its name; of a single one nothing."""
    named: dict[str, Mark] = {}
    for panel in figure.panels:
        for mark in panel.marks:
            named.setdefault(mark.name, mark)
    named.pop("", None)
    if len(named) < 2:  # noqa: PLR2004 - one series needs no name
        return {}
    return {name: _swatch(mark) for name, mark in named.items()}


def _swatch(mark: Mark) -> str:
    match mark:
        case Line():
            return f'<line x1="0" x2="16" y1="6" y2="6" {_stroke(mark)}/>'
        case Points():
            return _symbol(mark, min(mark.size, 9), (0.35, 6))
        case _:
            return f'<rect y="1" width="14" height="10" {_paint(mark.color)}/>'


def _paint(color: str, name: str = "fill") -> str:
    """Return the attributes for a colour's role, such as "accent/0.2"."""
    match = _ROLE.fullmatch(color)
    if match is None:
        raise ValueError(f"{color!r} is no role of the theme, such as accent or accent/0.2")
    opacity = f' {name}-opacity="{match[2]}"' if match[2] else ""
    return f'{name}="var(--{match[1]})"{opacity}'


def _stroke(line: Line) -> str:
    return f'{_paint(line.color, "stroke")} stroke-width="2"'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _px(number: float) -> str:
    """Return pixels with one digit at most."""
    return f"{number:.1f}".removesuffix(".0")


def _title(words: Sequence[str], number: int) -> str:
    """Return the element that browsers show on hovering; "" for no words."""
    return f"<title>{escape(words[number])}</title>" if words else ""


def _text(
    words: str, x: float, y: float, *, look: str = "tick", anchor: str = "middle",
    shift: float = 0, color: str = "",
) -> str:  # fmt: skip
    """Return a text at a share of the width and a height in pixels.

    Args:
        look: style classes.
        shift: pixels to the right.
    """
    more = f' dx="{shift:g}"' if shift else ""
    more += f" {_paint(color)}" if color else ""
    return (
        f'<text x="{_percent(x)}" y="{_px(y)}" text-anchor="{anchor}" class="{look}"{more}>'
        f"{escape(words)}</text>"
    )


def _vertical(share: float, place: _Place, look: str) -> str:
    left = _percent(share)
    return f'<line x1="{left}" x2="{left}" y1="{_px(place.top)}" y2="{_px(place.bottom)}" {look}/>'


def _stretch(inner: str, height: float) -> str:
    return (
        f'<svg class="lines" width="100%" height="{_px(height)}" '
        f'viewBox="0 0 {SPAN} {_px(height)}" preserveAspectRatio="none">{inner}</svg>'
    )
