"""Axes of figures: where a value stands, and which values are labelled."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a figure.

    Args:
        title: with the unit.
        kind: of categories the first is on top, and they have no lines.
        end: of an axis from 0; None for an axis around its values.
        is_share: whether values are labelled as percentages with a sign, and 0 has a line.
    """

    title: str = ""
    kind: Kind = "linear"
    end: float | None = None
    is_share: bool = False


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
        low, high = _pad([_number(value, axis.kind) for value in values] or [0.0, 1.0], axis.kind)
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
        is_date, span = self.axis.kind == "date", self.high - self.low
        step = _round_step(span / _MOST_TICKS)
        if is_date:
            step = next((step for step in _SPANS if span / step <= _MOST_TICKS), _SPANS[-1])
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

    def _log_ticks(self) -> Iterator[Tick]:
        """Yield 1, 2 and 5 of each power of ten that is on the axis."""
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for digit in _STEPS[:-1]:
                share = self.share(digit * 10.0**power)
                if 0 <= share <= 1:
                    yield Tick(share, f"{digit * 10.0**power:,.9g}")


def _number(value: Value, kind: Kind) -> float:
    if kind == "date":
        return datetime.fromisoformat(str(value)).replace(tzinfo=UTC).timestamp()
    return math.log10(float(value)) if kind == "log" else float(value)


def _pad(numbers: Sequence[float], kind: Kind) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    size = max(abs(low), abs(high))
    if high - low <= _NEARLY * size:
        around = _AROUND_A_DATE if kind == "date" else size / 2 or 0.5
        low, high = low - around, high + around
    pad = _PADDING * (high - low)
    return low - pad, high + pad


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
