"""The grammar of figures: panels of typed marks between two axes, as data that `svg.py` draws.

Colours are roles of the stylesheet: "accent" is its `--accent`, "accent/0.2" the same with
opacity 0.2. A series without a name is not in the legend; `hover` has a text for each mark.
"""

from dataclasses import dataclass
from typing import TypeAlias

from moetune.report.axes import Axis, Value

ROLES = ("ink", "muted", "grid", "surface", "accent", "second", "third")
Values: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points."""

    x: Values
    y: Values
    name: str = ""
    color: str = "accent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Points of so many pixels, as filled circles."""

    x: Values
    y: Values
    name: str = ""
    color: str = "accent"
    size: float
    hover: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars, each in a row.

    Args:
        starts: where the bars begin.
        texts: in the bars.
    """

    rows: tuple[str, ...]
    starts: tuple[float, ...]
    lengths: tuple[float, ...]
    name: str = ""
    color: str
    texts: tuple[str, ...] = ()
    text_color: str = ""
    hover: tuple[str, ...] = ()


Mark: TypeAlias = Line | Points | Bars


def along(mark: Mark) -> Values:
    """Return a mark's values on the x axis."""
    match mark:
        case Bars():
            ends = zip(mark.starts, mark.lengths, strict=True)
            return (0.0, *(start + length for start, length in ends))
        case _:
            return mark.x


def across(mark: Mark) -> Values:
    """Return a mark's values on the y axis."""
    match mark:
        case Bars():
            return mark.rows
        case _:
            return mark.y


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Marks between two axes; those that come later are on top."""

    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    title: str = ""
