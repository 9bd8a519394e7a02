"""Axes of the charts that a page draws: where a number stands, and marks at round ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetune.domain.units import format_bytes, format_seconds
from moetune.report.scales import round_step

_TICKS = 5
_NEARLY = 1e-9
_EDGE = 0.04
"""Share of an axis that half a text needs."""
ROOM = 1.06
"""Of the longest bar, and of the farthest point: what an axis has in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMark:
    """A mark of an axis, in percent.

    Args:
        anchor: "begins" or "ends" where a text around the mark would leave the axis.
    """

    at: str
    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """A stretch of numbers: from 0, unless all of them are far from it."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Axis":
        """Return the axis of points."""
        least, most = min(values), max(values)
        margin = (ROOM - 1) * most if least < most / 2 else max((most - least) / 5, most / 50)
        return cls(0.0 if least < most / 2 else least - margin, most + margin)

    def share(self, value: float) -> float:
        """Return 0 for the value at which the axis begins, 1 for that at which it ends."""
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(
        self, words: Callable[[float], str], *, unit: float = 1.0, is_upward: bool = False
    ) -> tuple[AxisMark, ...]:
        """Return marks at round numbers of the unit.

        Args:
            is_upward: whether the axis begins at the bottom.
        """
        step = unit * round_step((self.high - self.low) / unit / _TICKS)
        first, last = math.ceil(self.low / step - _NEARLY), math.floor(self.high / step + _NEARLY)
        shares = ((at * step, self.share(at * step)) for at in range(first, last + 1))
        return tuple(
            AxisMark(
                at=percentage(1 - share if is_upward else share), text=words(value),
                anchor="begins" if share < _EDGE else "ends" if share > 1 - _EDGE else "",
            )
            for value, share in shares
        )  # fmt: skip


def binary_unit(num_bytes: float) -> float:
    """Return the unit that a size is written in."""
    return 2.0 ** (10 * math.floor(math.log2(max(num_bytes, 1.0)) / 10))


def time_words(seconds: float) -> str:
    """Return "20 ms", or "0" alone."""
    return _plain(format_seconds(seconds)) if seconds else "0"


def size_words(num_bytes: float) -> str:
    """Return "20 GiB", or "0" alone."""
    return _plain(format_bytes(num_bytes)) if num_bytes else "0"


def _plain(text: str) -> str:
    """Return "20 ms" of "20.0 ms": a round number has no digits to spare."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def percentage(share: float) -> str:
    """Return a share as a place of SVG."""
    return f"{100 * share:.3f}%"
