"""Sections as lines of text: the terminal's answers, and `print` of a plan in a program."""

import io
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TextIO

from moetune.report.section import Cell, Section, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 80
NARROWEST = 20
_GOES_ON = " \\"
_COMMAND = re.compile(r":\s+(moetune [a-z]+ [^`]*?)\.?$")
"""A command at the end of a sentence, without its full stop."""
_SHORT_COMMAND = re.compile(r"`moetune [^`]{1,40}`")
"""A command in a sentence, which is never cut; longer commands are, with backslashes."""
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:[mµn]?s|[KMGT]?i?B|[GT]FLOP/s)\b|%)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPrinter:
    """Printer of wrapped paragraphs and of tables with columns.

    Args:
        color: whether a terminal may show styles.
        file: gets plain lines of `WIDTH` characters; None for stdout, as wide as its terminal.
        most_rows: rows to print of a table, before a count of the rest; None for all.
    """

    color: bool = True
    file: TextIO | None = None
    most_rows: int | None = None

    def sections(self, sections: Iterable[Section]) -> None:
        """Print sections with an empty line between them."""
        for number, section in enumerate(sections):
            if number:
                self.say()
            self.section(section)

    def say(self, text: str = "", *, indent: int = 0, style: str = "") -> None:
        """Print a paragraph of the answer, wrapped; a number and its unit stay together."""
        from rich.text import Text

        width = max(NARROWEST, min(WIDTH, self._console().width) - indent)
        for line in _wrap(text, width) or ("",):
            self._emit(Text(" " * indent + line.replace(_HARD_SPACE, " "), style=style))

    def section(self, section: Section) -> None:
        """Print a section: title, paragraphs, tables and notes."""
        title = " · ".join(filter(None, (section.title, section.scope)))
        if title:
            self.say(title, style="bold")
        lead, rest = section.paragraphs[:1], section.paragraphs[1:]
        words = [*section.doubts, *lead, *filter(None, (section.summary,)), *rest]
        if title and section.scope and (words or section.tables or section.notes):
            self.say()
        indent = 2 if title or words or section.notes else 0
        for paragraph in words:
            self.say(paragraph, indent=2)
        for number, table in enumerate(section.tables):
            if number or words:
                self.say()
            self.table(table, indent=indent)
        if section.notes and section.tables:
            self.say()
        for note in section.notes:
            self.say(note, indent=2)

    def table(self, table: Table, *, indent: int = 2) -> None:
        """Print columns, numbers flush right; columns of prose follow below, row by row."""
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text

        if not table.rows:
            self.say(table.empty, indent=indent)
            return
        rows = table.rows[: self.most_rows]
        omitted = {*table.prose, *table.wide}
        shown = [column for column, name in enumerate(table.header) if name not in omitted]
        grid = Grid(
            box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False,
            show_header=any(table.header),
        )  # fmt: skip
        numbers = table.numbers
        for column in shown:
            grid.add_column(
                Text(table.header[column]),
                justify="right" if column in numbers else "left",
                overflow="fold",
            )
        for row in rows:
            grid.add_row(*(Text(_plain(row[column])) for column in shown))
        width = min(WIDTH, self._console().width)
        self._emit(Padding(grid, (0, 0, 0, indent), expand=False), width)
        prose = [table.header.index(name) for name in table.prose]
        for row in rows if prose else ():
            words = "; ".join(row[column].text for column in prose if row[column].text)
            self.say(f"{row[0].text}: {words}", indent=indent)
        if more := len(table.rows) - len(rows) + table.num_more:
            self.say(f"… and {more:,} more: --all", indent=indent)
        for note in table.notes:
            self.say(note, indent=indent)

    def _console(self, *, stderr: bool = False) -> "Console":
        from rich.console import Console

        if self.file is not None:  # a notebook would otherwise draw the lines itself
            return Console(
                file=self.file, width=WIDTH, color_system=None, force_terminal=False,
                force_jupyter=False, highlight=False, markup=False,
            )  # fmt: skip
        return Console(
            stderr=stderr, no_color=None if self.color else True, highlight=False, markup=False
        )

    def _emit(self, renderable: "RenderableType", width: int | None = None) -> None:
        """Print without the spaces that rich adds at the ends of lines."""
        console = self._console()
        with console.capture() as captured:
            console.print(renderable, width=width, soft_wrap=width is None)
        for line in captured.get().splitlines():
            (self.file or sys.stdout).write(f"{line.rstrip()}\n")


def _wrap(text: str, width: int) -> list[str]:
    """Return wrapped lines; where a command is cut, its line ends in a shell's backslash."""
    match = _COMMAND.search(text)
    if match:
        lead, command = text[: match.start()] + ":", match[1]
        return [*_wrap(lead, width), *_continuation(command, width)]
    whole = _SHORT_COMMAND.sub(lambda match: match[0].replace(" ", _HARD_SPACE), text)
    lines = textwrap.wrap(
        _UNIT.sub(_HARD_SPACE, whole),
        width - (len(_GOES_ON) if "`moetune " in text else 0),
        break_long_words=False,
        break_on_hyphens=False,
    )
    ends = accumulate(line.count("`") for line in lines)
    return [
        f"{line}{_GOES_ON}" if quotes % 2 else line
        for line, quotes in zip(lines, ends, strict=True)
    ]


def _continuation(command: str, width: int) -> list[str]:
    """Return the lines of a command; all but the last end in a backslash."""
    lines = textwrap.wrap(
        command, width - len(_GOES_ON), subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [*(f"{line}{_GOES_ON}" for line in lines[:-1]), *lines[-1:]]


def _plain(cell: Cell) -> str:
    return f"{cell.text} *" if cell.mark == "chosen" else cell.text


def text_of(sections: Iterable[Section]) -> str:
    """Return the sections as the command line prints them, without colour."""
    text = io.StringIO()
    SectionPrinter(file=text).sections(sections)
    return text.getvalue().rstrip("\n")
