"""Marks of a figure as SVG elements: lines, bands, points, bars, texts and shapes.

Heights are in pixels, widths in shares of the figure: it fills whatever width it is given, and its
texts and lines keep their size. Lines stand in an inner drawing of `SPAN` units that is stretched
with the figure, everything else at a percentage.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from moetune.report.scales import Place, Scale

SPAN = 1000
"""Width of the drawing that lines stand in."""
CHARACTER_PIXELS = 7.0
"""Width of a character of 12 pixels height, in wide fonts."""
PHONE_PIXELS = 250
"""Width of a drawing on a phone."""
_ROLE = re.compile(r"@(\w+)(?:/([\d.]+))?")
_DASHES = {"solid": "", "dot": "2 3", "dash": "6 4"}
_SYMBOLS = {
    "circle": "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z",
    "square": "M-{r} -{r}h{d}v{d}h-{d}z",
    "diamond": "M0 -{r}l{r} {r}l-{r} {r}l-{r} -{r}z",
    "triangle-up": "M0 -{r}l{r} {d}h-{d}z",
    "cross": "M-{r} 0h{d}M0 -{r}v{d}",
    "x-thin": "M-{r} -{r}l{d} {d}M{r} -{r}l-{d} {d}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A rectangle of a figure with its two scales.

    Args:
        top, height: in pixels.
        pixels: width in the widest window, to know which texts fit into bars.
    """

    x: Scale
    y: Scale
    top: float
    height: float
    pixels: float

    def left(self, value: Place) -> float:
        """Return the share of the figure's width to the left of a value."""
        return self.x.share(value)

    def down(self, value: Place) -> float:
        """Return the pixels above a value."""
        return self.top + self.height * (1 - self.y.share(value))


def paint(color: str, name: str = "fill") -> str:
    """Return the attributes for a colour's role, such as "@accent/0.2".

    Raises:
        ValueError: the colour is not a role.
    """
    found = _ROLE.fullmatch(color)
    if found is None:
        raise ValueError(f"{color!r} is no role of the theme, such as @accent or @accent/0.2")
    opacity = f' {name}-opacity="{found[2]}"' if found[2] else ""
    return f'{name}="var(--{found[1]})"{opacity}'


def percentage(share: float) -> str:
    """Return a share as a width of SVG."""
    return f"{100 * share:.2f}%"


def pixels(number: float) -> str:
    """Return pixels with one digit at most."""
    return f"{number:.1f}".removesuffix(".0")


def title(words: str) -> str:
    """Return the element that browsers show on hovering; "" for no words."""
    return f"<title>{escape(words)}</title>" if words else ""


def text(
    words: str, x: float, y: float, *, anchor: str = "middle", classes: str = "",
    color: str = "", size: float = 0, shift: float = 0, is_bold: bool = False,
) -> str:  # fmt: skip
    """Return a text at a share of the width and a height in pixels.

    Args:
        shift: pixels to the right.
    """
    more = f' class="{classes}"' if classes else ""
    more += f" {paint(color)}" if color else ""
    more += f' font-size="{size:g}"' if size else ""
    more += f' dx="{shift:g}"' if shift else ""
    more += ' font-weight="600"' if is_bold else ""
    return (
        f'<text x="{percentage(x)}" y="{pixels(y)}" text-anchor="{anchor}"{more}>'
        f"{escape(words)}</text>"
    )


def hover(trace: Mapping[str, Any], at: int) -> str:
    """Return what is shown on hovering over a mark; "" for nothing."""
    return str(trace["hovertext"][at]) if "hovertext" in trace else ""


def line_marks(trace: Mapping[str, Any], panel: Panel, below: Mapping[str, Any] | None) -> str:
    """Return a trace's line, and the band down to the trace before it where it has one.

    Args:
        below: the trace before it.
    """
    points = _line_points(trace, panel)
    found = ""
    if "fillcolor" in trace and below is not None:
        outline = [*points, *reversed(_line_points(below, panel))]
        found += f'<path class="band" d="{_path(outline)}z" {paint(trace["fillcolor"])}/>'
    style = trace.get("line", {})
    if style.get("width"):
        found += f'<path class="line" d="{_path(points)}" {stroke(style)}/>'
    return found


def stroke(style: Mapping[str, Any]) -> str:
    """Return the attributes of a line."""
    dash = _DASHES[style.get("dash", "solid")]
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return f'{paint(style["color"], "stroke")} stroke-width="{style["width"]:g}"{more}'


def _line_points(trace: Mapping[str, Any], panel: Panel) -> list[tuple[float, float]]:
    points = [
        (SPAN * panel.left(x), panel.down(y)) for x, y in zip(trace["x"], trace["y"], strict=True)
    ]
    if trace.get("line", {}).get("shape") != "hv":
        return points
    corners = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return [one for pair in zip(points, [*corners, points[-1]], strict=True) for one in pair]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{pixels(x)} {pixels(y)}" for x, y in points)


def point_marks(trace: Mapping[str, Any], panel: Panel) -> Iterator[str]:
    """Yield a trace's points, each with what is shown on hovering."""
    marker = trace["marker"]
    for at, (x, y) in enumerate(zip(trace["x"], trace["y"], strict=True)):
        place = panel.left(x), panel.down(y)
        yield symbol(marker, *place, title(hover(trace, at)))


def symbol(marker: Mapping[str, Any], x: float, y: float, inner: str = "") -> str:
    """Return one point's symbol at a share of the width and a height in pixels."""
    name = str(marker.get("symbol", "circle"))
    radius, color = marker.get("size", 6) / 2, marker["color"]
    kind = name.removesuffix("-open")
    if kind == name:
        rim = marker.get("line", {})
        look = paint(color) + (f" {stroke(rim)}" if rim else "")
    else:
        look = f'fill="none" {paint(color, "stroke")} stroke-width="1.5"'
    if kind == "circle":
        place = f'cx="{percentage(x)}" cy="{pixels(y)}" r="{radius:g}"'
        return f"<circle {place} {look}>{inner}</circle>"
    outline = _SYMBOLS[kind].format(r=f"{radius:g}", d=f"{2 * radius:g}")
    return (
        f'<svg x="{percentage(x)}" y="{pixels(y)}" overflow="visible">'
        f'<path d="{outline}" {look}>{inner}</path></svg>'
    )


def bar_marks(
    trace: Mapping[str, Any], panel: Panel, starts: Sequence[float], gap: float
) -> Iterator[str]:
    """Yield a trace's horizontal bars and the texts in or beside them.

    Args:
        starts: where each bar begins.
        gap: share of a row that stays free.
    """
    row = panel.height / len(panel.y.categories)
    thick = row * (1 - gap)
    look = paint(trace["marker"]["color"])
    rim = trace["marker"].get("line")
    look += f" {stroke(rim)}" if rim else ""
    for at, (name, start, length) in enumerate(zip(trace["y"], starts, trace["x"], strict=True)):
        left, right = panel.left(start), panel.left(start + length)
        middle = panel.down(name)
        yield (
            f'<rect x="{percentage(left)}" y="{pixels(middle - thick / 2)}" '
            f'width="{percentage(right - left)}" height="{pixels(thick)}" {look}>'
            f"{title(hover(trace, at))}</rect>"
        )
        words = str(trace["text"][at]) if "text" in trace else ""
        if words:
            yield _bar_text(words, trace, panel, (left, right, middle))


def _bar_text(
    words: str, trace: Mapping[str, Any], panel: Panel, place: tuple[float, float, float]
) -> str:
    left, right, middle = place
    if trace["textposition"] == "outside":
        return text(words, right, middle + 4, anchor="start", shift=5, classes="tick")
    font = trace["textfont"]
    needs = len(words) * font["size"] * 0.6 + 2
    if (right - left) * panel.pixels < needs:
        return ""
    fits = (right - left) * PHONE_PIXELS >= needs
    return text(
        words, (left + right) / 2, middle + font["size"] * 0.35, size=font["size"],
        color=font["color"], classes="mark" if fits else "mark roomy",
    )  # fmt: skip
