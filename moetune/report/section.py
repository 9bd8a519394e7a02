"""Sections: titles, words, tables and figures of a plan, a profile or a comparison.

`app.views` makes them; the command line draws them with rich, the pages and the report with
Jinja, and `--json` prints their values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.report.figure import SECONDS, Figure

Value: TypeAlias = str | int | float | None
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fact: a value for programs, a text for people.

    Args:
        value: seconds, bytes, a share of 1, a count, or words; None if it is unknown.
        unit: the value's unit: "s", "B", "1" for a share, or "".
        href: link on a page; "" without a link.
        mark: style class: "chosen", "good", "usable", "suspect", "code", or "".
    """

    text: str
    value: Value = None
    unit: str = ""
    href: str = ""
    mark: str = ""

    @property
    def is_number(self) -> bool:
        """Whether columns of such cells are set flush right, and sorted by value."""
        return isinstance(self.value, int | float)

    @classmethod
    def words(cls, words: str, *, href: str = "", mark: str = "") -> "Cell":
        """Return a cell of words."""
        return cls(text=words, value=words, href=href, mark=mark)

    @classmethod
    def count(cls, number: float) -> "Cell":
        """Return a cell with a number, whose text is rounded to a whole number."""
        return cls(text=f"{number:,.0f}", value=number)

    @classmethod
    def seconds(cls, number: float | None) -> "Cell":
        """Return a cell with a duration; an empty cell for None."""
        text = "" if number is None else format_seconds(number)
        return cls(text=text, value=number, unit="s")

    @classmethod
    def size(cls, number: int | None) -> "Cell":
        """Return a cell with a number of bytes; an empty cell for None."""
        return cls(text="" if number is None else format_bytes(number), value=number, unit="B")

    @classmethod
    def share(cls, number: float | None, *, digits: int = 1, sign: bool = False) -> "Cell":
        """Return a cell with a percentage; an empty cell for None."""
        text = "" if number is None else format_share(number, digits=digits, sign=sign)
        return cls(text=text, value=number, unit="1")


EMPTY = Cell(text="")
_MOST_ON_A_PHONE = 3
"""Columns that fit next to each other."""


class Highlight(NamedTuple):
    """A number to read first, with a note to compare it with."""

    name: str
    cell: Cell
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of facts; on a page the reader can sort and filter them.

    Args:
        name: of letters, digits and hyphens; unique on its page.
        title: "" if the section's title is enough.
        prose: columns of sentences, which a terminal prints below the table, row by row.
        wide: columns that a terminal omits.
        notes: meaning of the columns.
        empty: text instead of a table without rows.
        is_narrow: whether a page shows it at less than its full width.
        num_more: further rows that were not read.
    """

    name: str
    title: str = ""
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    prose: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    empty: str = "Nothing yet."
    is_narrow: bool = False
    num_more: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        items: Iterable[Item],
        columns: Mapping[str, Callable[[Item], Cell | str]],
        **fields: Any,  # noqa: ANN401 - other fields of a table
    ) -> "Table":
        """Return a table with a row for each item; `columns` are functions by heading."""
        cells = [[column(item) for column in columns.values()] for item in items]
        rows = tuple(
            tuple(Cell.words(cell) if isinstance(cell, str) else cell for cell in row)
            for row in cells
        )
        return cls(name=name, header=tuple(columns), rows=rows, **fields)

    @property
    def is_stacked(self) -> bool:
        """Whether a phone shows the cells of a row below each other, each with its heading."""
        return len(self.header) > _MOST_ON_A_PHONE

    @property
    def numbers(self) -> frozenset[int]:
        """Indices of the columns of numbers."""
        return frozenset(
            column
            for column in range(len(self.header))
            if any(row[column].is_number for row in self.rows)
        )


def without_empty_columns(table: Table) -> Table:
    """Return the table without the columns in which no row says anything."""
    filled = [
        column for column in range(len(table.header)) if any(row[column].text for row in table.rows)
    ]
    header = tuple(table.header[column] for column in filled)
    rows = tuple(tuple(row[column] for column in filled) for row in table.rows)
    return replace(
        table, header=header, rows=rows, wide=tuple(name for name in table.wide if name in header)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One topic: words, highlights, tables and figures.

    Args:
        name: of letters, digits and hyphens; unique on its page.
        title: "" for a section that continues the previous section.
        scope: one line of sizes, ranks or a machine below the title.
        doubts: why the answer may be wrong; they stand before the answer.
        paragraphs: the answer first.
        highlights: the numbers to read first, for a page.
        summary: the numbers of the highlights in a sentence, for a terminal.
        notes: warnings.
    """

    name: str
    title: str = ""
    scope: str = ""
    doubts: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()
    highlights: tuple[Highlight, ...] = ()
    summary: str = ""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()


def values_of(section: Section) -> dict[str, object]:
    """Return the section's values for `--json`: numbers in SI units, words unchanged."""
    return {
        "name": section.name,
        "title": section.title,
        "scope": section.scope,
        "paragraphs": [*section.doubts, *section.paragraphs],
        "highlights": [
            {
                "name": highlight.name,
                "value": highlight.cell.value,
                "unit": highlight.cell.unit,
                "note": highlight.note,
            }
            for highlight in section.highlights
        ],
        "tables": [_table_values(table) for table in section.tables],
        "notes": list(section.notes),
    }


def _table_values(table: Table) -> dict[str, object]:
    units = [
        {row[column].unit for row in table.rows if row[column].value is not None}
        for column in range(len(table.header))
    ]
    return {
        "name": table.name,
        "header": list(table.header),
        "units": [next(iter(some)) if len(some) == 1 else "" for some in units],
        "rows": [[cell.value for cell in row] for row in table.rows],
        "notes": list(table.notes),
    }


def facts(name: str, rows: Iterable[tuple[str, str]], *, header: Sequence[str] = ("", "")) -> Table:
    """Return a table of names and values."""
    cells = ((Cell.words(key), Cell.words(value, mark="code")) for key, value in rows)
    return Table(name=name, header=tuple(header), rows=tuple(cells), is_narrow=True)


def sentence(text: str) -> str:
    """Capitalize a text unless it begins with a name; end it with a stop unless with a command."""
    is_word = text[:2].isalpha() and "_" not in text.partition(" ")[0]
    start = text[:1].upper() if is_word else text[:1]
    return start + text[1:] + ("" if text.endswith((".", "`")) else ".")


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return "1 chunk" or "2 chunks"; `nouns` is an irregular plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def chance(share: float) -> str:
    """Return a chance in percent, never 0 or 100: agreement of all draws is not certainty."""
    rounded = round(100 * share)
    if rounded <= 0:
        return "under 1 %"
    return "over 99 %" if rounded >= 100 else f"{rounded} %"  # noqa: PLR2004 - percent


def seconds_span(seconds: float, low: float, high: float) -> str:
    """Return "21.4 ms (20.6–22.5)": the range in the unit and with the digits of the value."""
    number, _, unit = format_seconds(seconds).partition(" ")
    factor, digits = SECONDS[unit], len(number.partition(".")[2])
    return f"{number} {unit} ({low / factor:.{digits}f}–{high / factor:.{digits}f})"
