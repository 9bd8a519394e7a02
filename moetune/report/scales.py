"""Scales of figures: where a value stands on an axis, and which values are labelled."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["linear", "log", "date", "category"]
Place: TypeAlias = float | str
"""A number, a date in ISO 8601, or a category's name."""

_PADDING = 0.03
_NEARLY = 1e-9
_LEAST_SPREAD = 1e-9
"""Of values that count as equal, relative to them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled place; `share` is 0 where the axis begins and 1 where it ends."""

    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis's values from its beginning to its end, which may be the smaller one.

    Args:
        low, high: numbers; decimal logarithms of a log scale, seconds since 1970 of dates, indices
            of categories.
    """

    kind: Kind
    low: float
    high: float
    categories: tuple[str, ...] = ()

    def share(self, value: Place) -> float:
        """Return 0 for the value at which the axis begins, 1 for that at which it ends."""
        return (self.number(value) - self.low) / (self.high - self.low)

    def number(self, value: Place) -> float:
        """Return the value as `low` and `high` count."""
        return _number(value, self.kind, self.categories)

    def ticks(self, axis: Mapping[str, Any]) -> tuple[Tick, ...]:
        """Return the labelled places: the axis's own, else round ones."""
        if self.kind == "category":
            return tuple(Tick(share=self.share(one), text=one) for one in self.categories)
        if "tickvals" in axis:
            pairs = zip(axis["tickvals"], axis["ticktext"], strict=True)
            found = [Tick(share=self.share(value), text=text) for value, text in pairs]
            inside = [one for one in found if abs(one.share - 0.5) <= 0.5 + _NEARLY]
            return tuple(inside[:: -(-len(inside) // (_MOST_TICKS + 1)) or 1])
        if self.kind == "date":
            return self._dates()
        return self._round_numbers(axis.get("dtick"), axis.get("tickformat", ""))

    def _round_numbers(self, wanted: float | None, template: str) -> tuple[Tick, ...]:
        low, high = sorted((self.low, self.high))
        step = wanted or round_step((high - low) / _MOST_TICKS)
        if wanted and (high - low) / wanted > 2 * _MOST_TICKS:
            step = round_step((high - low) / _MOST_TICKS)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        values = [at * step for at in range(first, last + 1)]
        return tuple(Tick(share=self.share(one), text=_text(one, step, template)) for one in values)

    def _dates(self) -> tuple[Tick, ...]:
        span = self.high - self.low
        step = next((one for one in _SPANS if span / one <= _MOST_TICKS), _SPANS[-1])
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        has_days = span > _DAY
        return tuple(
            Tick(
                share=(at * step - self.low) / span,
                text=_date_text(_EPOCH + timedelta(seconds=at * step), step, has_days=has_days),
            )
            for at in range(first, last + 1)
        )


def scale_of(axis: Mapping[str, Any], values: Iterable[Place]) -> Scale:
    """Return the scale of an axis of `theme.axis` for everything that stands on it."""
    found = list(values)
    kind = _kind(axis, found)
    is_reversed = axis.get("autorange") == "reversed"
    if kind == "category":
        names = tuple(dict.fromkeys(str(one) for one in found))
        low, high = -0.5, len(names) - 0.5
        low, high = (high, low) if is_reversed else (low, high)
        return Scale(kind=kind, low=low, high=high, categories=names)
    if "range" in axis:
        low, high = axis["range"]
        return Scale(kind=kind, low=low, high=high)
    numbers = [_number(one, kind, ()) for one in found] or [0.0, 1.0]
    low, high = _padded(numbers, to_zero=axis.get("rangemode") == "tozero", kind=kind)
    return Scale(kind=kind, low=low, high=high)


def _kind(axis: Mapping[str, Any], values: Sequence[Place]) -> Kind:
    given = axis.get("type")
    if given is not None:
        kind: Kind = given
        return kind
    return "category" if any(isinstance(one, str) for one in values) else "linear"


def _number(value: Place, kind: Kind, categories: tuple[str, ...]) -> float:
    if kind == "category":
        return categories.index(str(value))
    if kind == "date":
        return datetime.fromisoformat(str(value)).replace(tzinfo=UTC).timestamp()
    return math.log10(float(value)) if kind == "log" else float(value)


def _padded(numbers: Sequence[float], *, to_zero: bool, kind: Kind) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    if to_zero and kind == "linear":
        low, high = min(low, 0.0), max(high, 0.0)
    size = max(abs(low), abs(high))
    if high - low <= _LEAST_SPREAD * size:
        around = _AROUND_A_DATE if kind == "date" else size / 2 or 0.5
        low, high = low - around, high + around
        low = max(low, 0.0) if to_zero and high > 0 else low
    pad = _PADDING * (high - low)
    stands = to_zero and kind == "linear"
    return (
        low if stands and low == 0 else low - pad,
        high if stands and high == 0 else high + pad,
    )


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(one for one in _STEPS if one * power >= least * (1 - 1e-9)) * power


def _text(value: float, step: float, template: str) -> str:
    """Return a number with the digits of the step; `template` is "" or one of a percentage."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if not template:
        return f"{value + 0.0:,.{digits}f}"
    sign = "+" if "+" in template and round(value, digits) else ""
    return f"{value + 0.0:{sign},.{max(0, digits - 2)}%}"


def _date_text(at: datetime, step: int, *, has_days: bool) -> str:
    if step >= _DAY:
        return f"{at:%b} {at.day}"
    if has_days and at.hour == at.minute == 0:
        return f"{at:%b} {at.day}"
    return f"{at:%H:%M}" if step >= _MINUTE else f"{at:%H:%M:%S}"
