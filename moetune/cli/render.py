"""Rendering of sections, lines and errors on a terminal, and of JSON; the only importer of rich."""

import json
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.document import encode
from moetune.domain.error_document import ErrorDocument
from moetune.domain.errors import LayoutTooLargeError, MoetuneError
from moetune.report.section import Cell, Section, Table, values_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 80
NARROWEST = 20
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:[mµn]?s|[KMGT]?i?B|[GT]FLOP/s)\b|%)")
_TRACEBACK_VERBOSITY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Output of a command: answers on stdout, notes and errors on stderr.

    Args:
        most_rows: of a table, behind which stands how many more there are; None for all.
    """

    color: bool = True
    quiet: bool = False
    verbosity: int = 0
    most_rows: int | None = None

    def say(self, text: str = "", *, indent: int = 0, style: str = "") -> None:
        """Print a paragraph of the answer, wrapped; a number and its unit stay together."""
        from rich.text import Text

        lines = textwrap.wrap(
            _UNIT.sub(_HARD_SPACE, text),
            max(NARROWEST, min(WIDTH, self._console().width) - indent),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or ("",):
            self._emit(Text(" " * indent + line.replace(_HARD_SPACE, " "), style=style))

    def line(self, text: str) -> None:
        """Print one line of the answer without wrapping, such as a path or a command."""
        self._console().print(text, soft_wrap=True, markup=False, highlight=False)

    def answer(
        self,
        sections: Iterable[Section],
        document: Mapping[str, object] | None = None,
        *,
        as_json: bool = False,
    ) -> None:
        """Print sections in words and tables, or their values as JSON.

        Args:
            document: more keys of the JSON document; programs rely on them.
        """
        if as_json:
            self.document({**(document or {}), "sections": [values_of(one) for one in sections]})
            return
        for at, section in enumerate(sections):
            if at:
                self.say()
            self.section(section)

    def section(self, section: Section) -> None:
        """Print a section: title, paragraphs, tables and notes."""
        title = " · ".join(filter(None, (section.title, section.scope)))
        if title:
            self.say(title, style="bold")
        lead, rest = section.paragraphs[:1], section.paragraphs[1:]
        words = [*lead, *filter(None, (section.summary,)), *rest]
        if title and section.scope and (words or section.tables or section.notes):
            self.say()
        indent = 2 if title or words or section.notes else 0
        for one in words:
            self.say(one, indent=2)
        for at, table in enumerate(section.tables):
            if at or words:
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
        shown = [at for at, name in enumerate(table.header) if name not in omitted]
        grid = Grid(
            box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False,
            show_header=any(table.header),
        )  # fmt: skip
        numbers = table.numbers
        for at in shown:
            grid.add_column(
                Text(table.header[at]),
                justify="right" if at in numbers else "left",
                overflow="fold",
            )
        for row in rows:
            grid.add_row(*(Text(_plain(row[at])) for at in shown))
        width = min(WIDTH, self._console().width)
        self._emit(Padding(grid, (0, 0, 0, indent), expand=False), width)
        prose = [table.header.index(name) for name in table.prose]
        for row in rows if prose else ():
            words = "; ".join(row[at].text for at in prose if row[at].text)
            self.say(f"{row[0].text}: {words}", indent=indent)
        if more := len(table.rows) - len(rows) + table.num_more:
            self.say(f"… and {more:,} more: --all", indent=indent)
        for note in table.notes:
            self.say(note, indent=indent)

    def note(self, text: str) -> None:
        """Print a line on stderr, unless quiet."""
        if not self.quiet:
            self._console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)

    def detail(self, text: str) -> None:
        """Print a line on stderr with -v."""
        if self.verbosity:
            self.note(text)

    def document(self, value: object) -> None:
        """Print one JSON document on stdout."""
        plain = encode(value)
        sys.stdout.write(json.dumps(plain, ensure_ascii=False, indent=2, allow_nan=False) + "\n")

    def error(self, error: MoetuneError, *, as_json: bool) -> None:
        """Print an error and its hint on stderr, and as JSON also on stdout."""
        if as_json:
            plan = error.plan if isinstance(error, LayoutTooLargeError) else None
            self.document(
                ErrorDocument(
                    error=error.what, hint=error.hint, exit_code=error.exit_code, plan=plan
                )
            )
        from rich.text import Text

        text = Text.assemble(("error: ", "bold red"), error.what)
        if error.hint:
            text.append(f"\n  {error.hint}")
        self._console(stderr=True).print(text, soft_wrap=True)
        if self.verbosity >= _TRACEBACK_VERBOSITY:
            traceback.print_exception(error.__cause__ or error, file=sys.stderr)

    def _console(self, *, stderr: bool = False) -> "Console":
        from rich.console import Console

        return Console(
            stderr=stderr, no_color=None if self.color else True, highlight=False, markup=False
        )

    def _emit(self, renderable: "RenderableType", width: int | None = None) -> None:
        """Print on stdout without the spaces with which rich pads lines."""
        console = self._console()
        with console.capture() as captured:
            console.print(renderable, width=width, soft_wrap=width is None)
        for line in captured.get().splitlines():
            sys.stdout.write(f"{line.rstrip()}\n")


def _plain(cell: Cell) -> str:
    """Return the cell's text, with a star for the chosen one."""
    return f"{cell.text} *" if cell.mark == "chosen" else cell.text
