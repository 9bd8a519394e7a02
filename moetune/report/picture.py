"""A figure with the words and the numbers that belong to it."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Figure: TypeAlias = dict[str, object]
"""What plotly draws: `data` and `layout`. Colours are roles of the theme, as in `theme.py`."""
Value: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure.

    Args:
        name: of letters, digits and hyphens; unique on its page, and the name of its CSV file.
        words: what it shows, also for those who cannot see it.
        header: of the rows, with units.
        rows: every number that is drawn.
    """

    name: str
    title: str
    words: str
    figure: Figure
    header: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    @property
    def csv(self) -> str:
        """The rows as comma-separated values (RFC 4180)."""
        return csv_text(self.header, self.rows)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return rows as comma-separated values; floats keep all their digits, None is empty."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
