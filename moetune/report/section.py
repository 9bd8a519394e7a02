"""A figure with the words and the numbers that belong to it."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from moetune.domain.units import format_bytes, format_seconds

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell.

    Args:
        key: what the column is sorted by; None for the text.
        href: where the cell leads; "" for nowhere.
        mark: how it is set: "chosen", "good", "usable", "suspect", "same", "code", or "".
    """

    text: str
    key: Value = None
    href: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that the reader can sort and filter.

    Args:
        name: of letters, digits and hyphens; unique on its page.
        right: indices of the columns of numbers.
        empty: what to say where there is no row.
        is_narrow: whether it is easier to read where it does not fill the page.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[int] = frozenset()
    empty: str = "Nothing yet."
    is_narrow: bool = False


def text(words: str, *, href: str = "", mark: str = "") -> Cell:
    """Return a cell of words."""
    return Cell(text=words, href=href, mark=mark)


def count(number: int, *, href: str = "") -> Cell:
    """Return a cell with a whole number."""
    return Cell(text=f"{number:,}", key=number, href=href)


def seconds(number: float | None) -> Cell:
    """Return a cell with a duration; an empty one for None."""
    return Cell(text="") if number is None else Cell(text=format_seconds(number), key=number)


def size(number: int | None) -> Cell:
    """Return a cell with a number of bytes; an empty one for None."""
    return Cell(text="") if number is None else Cell(text=format_bytes(number), key=number)


def share(number: float, *, digits: int = 1, sign: bool = False) -> Cell:
    """Return a cell with per cent."""
    return Cell(text=f"{100 * number:{'+' if sign else ''}.{digits}f} %", key=number)


def columns(*indices: int) -> frozenset[int]:
    """Return the columns to set flush right."""
    return frozenset(indices)


def facts(title: str, rows: Sequence[tuple[str, str]], *, name: str) -> Table:
    """Return a table of names and values."""
    return Table(
        name=name,
        title=title,
        header=("fact", "value"),
        rows=tuple((text(key), text(value, mark="code")) for key, value in rows),
        is_narrow=True,
    )
