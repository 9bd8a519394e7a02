"""Axes of figures: where a value stands, and which values are labelled."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["linear", "log", "category"]
Value: TypeAlias = float | str
"""A number, or a category's name."""

_PADDING = 0.03
_NEARLY = 1e-9
_MOST_TICKS = 6
_STEPS = (1.0, 2.0, 5.0, 10.0)
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a figure.

    Args:
        title: with the unit.
        kind: of categories the first is on top, and they have no lines.
        end: of an axis from 0; None for an axis around its values.
    """

    title: str = ""
    kind: Kind = "linear"
    end: float | None = None


ROWS = Axis(kind="category")


def seconds_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration: its length in seconds, and its name."""
    if not seconds:
        return _SECONDS[0]
    return next((unit for unit in _SECONDS if seconds >= unit[0]), _SECONDS[-1])


class Tick(NamedTuple):
    """A labelled place; `share` is 0 where the axis begins and 1 where it ends."""

    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis with everything that stands on it.

    Args:
        low, high: numbers where it begins and ends; decimal logarithms of a log scale, indices of
            categories.
    """

    axis: Axis
    low: float
    high: float
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, axis: Axis, values: Iterable[Value]) -> "Scale":
        """Return the scale of an axis for these values."""
        if axis.kind == "category":
            names = tuple(dict.fromkeys(map(str, values)))
            return cls(axis=axis, low=len(names) - 0.5, high=-0.5, categories=names)
        if axis.end is not None:
            return cls(axis=axis, low=0.0, high=axis.end)
        low, high = _pad([_number(value, axis.kind) for value in values] or [0.0, 1.0])
        return cls(axis=axis, low=low, high=high)

    def share(self, value: Value) -> float:
        """Return 0 for the value at which the axis begins, 1 for that at which it ends."""
        is_name = self.axis.kind == "category"
        place = self.categories.index(str(value)) if is_name else _number(value, self.axis.kind)
        return (place - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[Tick, ...]:
        """Return the labelled places: the categories, else round values."""
        if self.axis.kind == "category":
            return tuple(Tick(self.share(name), name) for name in self.categories)
        if self.axis.kind == "log":
            return tuple(self._log_ticks())
        span = self.high - self.low
        step = _round_step(span / _MOST_TICKS)
        first, last = math.ceil(self.low / step - _NEARLY), math.floor(self.high / step + _NEARLY)
        return tuple(
            Tick((value - self.low) / span, _text(value, step))
            for value in (place * step for place in range(first, last + 1))
        )

    def _log_ticks(self) -> Iterator[Tick]:
        """Yield 1, 2 and 5 of each power of ten that is on the axis."""
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for digit in _STEPS[:-1]:
                share = self.share(digit * 10.0**power)
                if 0 <= share <= 1:
                    yield Tick(share, f"{digit * 10.0**power:,.9g}")


def _number(value: Value, kind: Kind) -> float:
    return math.log10(float(value)) if kind == "log" else float(value)


def _pad(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    if high - low <= _NEARLY * size:
        around = size / 2 or 0.5
        low, high = low - around, high + around
    pad = _PADDING * (high - low)
    return low - pad, high + pad


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit for digit in _STEPS if digit * power >= least * (1 - _NEARLY)) * power


def _text(value: float, step: float) -> str:
    """Return a number with the digits of the step."""
    digits = max(0, -math.floor(math.log10(step) + _NEARLY))
    return f"{value + 0.0:,.{digits}f}"
