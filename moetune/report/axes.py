"""Axes of figures: where a value stands, and which values are labelled."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias

from moetune.domain.units import format_bytes, format_seconds

Kind: TypeAlias = Literal["linear", "log", "date", "category"]
Value: TypeAlias = float | str
"""A number, a date in ISO 8601, or a category's name."""

_PADDING = 0.03
_NEARLY = 1e-9
_AROUND_A_DATE = 1800.0
"""Seconds that an axis has on each side of a date that is alone."""
_MOST_TICKS = 6
_STEPS = (1.0, 2.0, 5.0, 10.0)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SPANS = (
    1, 5, 15, 30, _MINUTE, 5 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE, _HOUR, 3 * _HOUR, 6 * _HOUR,
    12 * _HOUR, _DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY, 90 * _DAY, 365 * _DAY,
)  # fmt: skip
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_COUNTS = ((2**40, "T"), (2**30, "G"), (2**20, "M"), (2**10, "k"), (1, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a figure.

    Args:
        title: with the unit.
        kind: of categories the first is on top, and they have no lines.
        ticks: values with their labels; round ones where there are none.
        from_zero: whether 0 is on the axis, at its end.
        end: of an axis from 0; None for the largest value.
        is_share: whether values are labelled as percentages with a sign, and 0 has a line.
        is_count: whether values are whole numbers.
    """

    title: str = ""
    kind: Kind = "linear"
    ticks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    end: float | None = None
    is_share: bool = False
    is_count: bool = False


ROWS = Axis(kind="category")


def log_seconds(title: str) -> Axis:
    """Return a logarithmic axis of seconds, labelled "10 µs", "1 ms"."""
    decades = [10.0**power for power in range(-9, 4)]
    return Axis(
        title=title,
        kind="log",
        ticks=tuple((decade, _whole(format_seconds(decade))) for decade in decades),
    )


def log_amounts(title: str) -> Axis:
    """Return a logarithmic axis of numbers, labelled "0.5", "20", "1,000"."""
    places = [digit * 10.0**power for power in range(-6, 15) for digit in _STEPS[:-1]]
    return Axis(title=title, kind="log", ticks=tuple((place, f"{place:,.9g}") for place in places))


def log_sizes(title: str, *, unit: str) -> Axis:
    """Return a logarithmic axis with ticks at powers of two: "64 KiB", or "4k" of a count.

    Args:
        unit: "bytes", or the name of counted things.
    """
    return Axis(
        title=title,
        kind="log",
        ticks=tuple(
            (2**power, _whole(format_bytes(2**power)) if unit == "bytes" else _count(2**power))
            for power in range(64)
        ),
    )


def _whole(words: str) -> str:
    return words.replace(".00", "").replace(".0", "")


def _count(number: int) -> str:
    """Return "512", "8k" (8192), "2M" (2^21), "1G" (2^30)."""
    factor, letter = _unit(number, _COUNTS)
    return f"{number / factor:.3g}{letter}"


def seconds_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration: its length in seconds, and its name."""
    return _unit(seconds, _SECONDS) if seconds else _SECONDS[0]


def bytes_unit(num_bytes: float) -> tuple[float, str]:
    """Return the unit for a size: its number of bytes, and its name."""
    return _unit(num_bytes, _BYTES)


def _unit(number: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit that is not larger than the number, else the smallest."""
    return next((unit for unit in units if number >= unit[0]), units[-1])


class Tick(NamedTuple):
    """A labelled place; `share` is 0 where the axis begins and 1 where it ends."""

    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis with everything that stands on it.

    Args:
        low, high: numbers where it begins and ends; decimal logarithms of a log scale, seconds
            since 1970 of dates, indices of categories.
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
        low, high = _pad([_number(value, axis.kind) for value in values] or [0.0, 1.0], axis)
        return cls(axis=axis, low=low, high=high)

    def share(self, value: Value) -> float:
        """Return 0 for the value at which the axis begins, 1 for that at which it ends."""
        is_name = self.axis.kind == "category"
        place = self.categories.index(str(value)) if is_name else _number(value, self.axis.kind)
        return (place - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[Tick, ...]:
        """Return the labelled places: the categories, the axis's own, else round ones."""
        if self.axis.kind == "category":
            return tuple(Tick(self.share(name), name) for name in self.categories)
        if self.axis.ticks:
            ticks = [Tick(self.share(place), text) for place, text in self.axis.ticks]
            inside = [tick for tick in ticks if abs(tick.share - 0.5) <= 0.5 + _NEARLY]
            return tuple(inside[:: -(-len(inside) // (_MOST_TICKS + 1)) or 1])
        is_date, span = self.axis.kind == "date", self.high - self.low
        step = _round_step(span / _MOST_TICKS)
        if is_date:
            step = next((step for step in _SPANS if span / step <= _MOST_TICKS), _SPANS[-1])
        if self.axis.is_count:
            step = max(step, 1.0)
        first, last = math.ceil(self.low / step - _NEARLY), math.floor(self.high / step + _NEARLY)
        return tuple(
            Tick(
                (value - self.low) / span,
                _date_text(value, step, span)
                if is_date
                else _text(value, step, is_share=self.axis.is_share),
            )
            for value in (place * step for place in range(first, last + 1))
        )


def _number(value: Value, kind: Kind) -> float:
    if kind == "date":
        return datetime.fromisoformat(str(value)).replace(tzinfo=UTC).timestamp()
    return math.log10(float(value)) if kind == "log" else float(value)


def _pad(numbers: Sequence[float], axis: Axis) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    if axis.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= _NEARLY * size:
        around = _AROUND_A_DATE if axis.kind == "date" else size / 2 or 0.5
        low, high = low - around, high + around
    pad = _PADDING * (high - low)
    stands = 0.0 if axis.from_zero else None
    return low if low == stands else low - pad, high if high == stands else high + pad


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit for digit in _STEPS if digit * power >= least * (1 - _NEARLY)) * power


def _text(value: float, step: float, *, is_share: bool) -> str:
    """Return a number with the digits of the step."""
    digits = max(0, -math.floor(math.log10(step) + _NEARLY))
    if not is_share:
        return f"{value + 0.0:,.{digits}f}"
    sign = "+" if round(value, digits) else ""
    return f"{value + 0.0:{sign},.{max(0, digits - 2)}%}"


def _date_text(seconds: float, step: float, span: float) -> str:
    moment = _EPOCH + timedelta(seconds=seconds)
    if step >= _DAY or (span > _DAY and moment.hour == moment.minute == 0):
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M}" if step >= _MINUTE else f"{moment:%H:%M:%S}"
