"""Figures as data: rows of bars, or points between two axes, which `svg.py` draws.

Colours are roles of the stylesheet: "accent" is its `--accent`, "accent/0.2" the same with
opacity 0.2. A series without a name is not in the legend.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.units import format_seconds

ROLES = ("ink", "muted", "grid", "surface", "accent", "second", "third")
_PADDING = 0.03
_NEARLY = 1e-9
_MOST_TICKS = 6
_DIGITS = (1.0, 2.0, 5.0, 10.0)
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
"""Units of durations, as `format_seconds` has them."""


def seconds_unit(seconds: float) -> tuple[float, str]:
    """Return the unit that a duration is printed in: its length in seconds, and its name."""
    unit = format_seconds(seconds).partition(" ")[2]
    return SECONDS[unit], unit


class Bar(NamedTuple):
    """A horizontal bar in a row; `hover` is shown at a pointer, `text` in the bar."""

    row: str
    start: float
    length: float
    text: str = ""
    hover: str = ""


class Point(NamedTuple):
    """A point; `hover` is shown at a pointer."""

    x: float
    y: float
    hover: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Bars or points of a colour.

    Args:
        text_color: colour of the texts in bars.
        size: diameter of a point in pixels; 0 for a line through the points.
    """

    name: str = ""
    color: str = "accent"
    bars: tuple[Bar, ...] = ()
    text_color: str = ""
    points: tuple[Point, ...] = ()
    size: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of numbers.

    Args:
        title: name and unit.
        end: where an axis from 0 ends; None for an axis around its values.
    """

    title: str = ""
    end: float | None = None
    is_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing with its description.

    Args:
        name: of letters, digits and hyphens; unique on its page.
        words: caption and text alternative.
        y: None for bars, whose rows are below each other.
        series: a later series is drawn on top.
    """

    name: str
    title: str
    words: str = ""
    x: Axis
    y: Axis | None = None
    series: tuple[Series, ...]


class Tick(NamedTuple):
    """A labelled place; `share` is 0 where the axis begins and 1 where it ends."""

    share: float
    text: str


class Scale(NamedTuple):
    """The numbers at which an axis begins and ends; for a log scale their decimal logarithms."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float]) -> "Scale":
        """Return the scale of an axis for these values."""
        if axis.end is not None:
            return cls(0.0, axis.end)
        numbers = [math.log10(value) if axis.is_log else value for value in values] or [0.0, 1.0]
        low, high = min(numbers), max(numbers)
        size = max(abs(low), abs(high))
        if high - low <= _NEARLY * size:
            low, high = low - (size / 2 or 0.5), high + (size / 2 or 0.5)
        padding = _PADDING * (high - low)
        return cls(low - padding, high + padding, axis.is_log)

    def share(self, value: float) -> float:
        """Return a value's place on the axis: 0 where the axis begins, 1 where it ends."""
        place = math.log10(value) if self.is_log else value
        return (place - self.low) / (self.high - self.low)

    def ticks(self) -> Iterator[Tick]:
        """Yield multiples of 1, 2 or 5 times a power of ten; on a log scale all three."""
        if self.is_log:
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            for value in (size * 10.0**power for power in powers for size in _DIGITS[:-1]):
                if 0 <= (share := self.share(value)) <= 1:
                    yield Tick(share, f"{value:,.9g}")
            return
        least = (self.high - self.low) / _MOST_TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(size * power for size in _DIGITS if size * power >= least * (1 - _NEARLY))
        digits = max(0, -math.floor(math.log10(step) + _NEARLY))
        first, last = math.ceil(self.low / step - _NEARLY), math.floor(self.high / step + _NEARLY)
        for value in (place * step for place in range(first, last + 1)):
            yield Tick(self.share(value), f"{value + 0.0:,.{digits}f}")
