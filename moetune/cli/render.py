"""Words, tables and JSON: the only importer of rich."""

import json
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.domain.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 80
NARROWEST = 20
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:[mµn]?s|[KMGT]?i?B)\b|%)")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_TRACEBACK_VERBOSITY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The answer goes to stdout, notes and errors go to stderr."""

    color: bool = True
    quiet: bool = False
    verbosity: int = 0

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
        """Print one line of the answer that must stay whole: a path or a command."""
        self._console().print(text, soft_wrap=True, markup=False, highlight=False)

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Iterable[int] = (),
        indent: int = 2,
    ) -> None:
        """Print columns; those whose numbers are in `right` are set flush right."""
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False,
            show_header=any(header),
        )  # fmt: skip
        numbers = set(right)
        for index, name in enumerate(header):
            table.add_column(
                Text(name), justify="right" if index in numbers else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        width = min(WIDTH, self._console().width)
        self._emit(Padding(table, (0, 0, 0, indent), expand=False), width)

    def note(self, text: str) -> None:
        """Print a line on stderr, unless quiet."""
        if not self.quiet:
            self._console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)

    def detail(self, text: str) -> None:
        """Print a line on stderr where -v asks for it."""
        if self.verbosity:
            self.note(text)

    def document(self, value: object) -> None:
        """Print one JSON document on stdout."""
        plain = encode(value)
        sys.stdout.write(json.dumps(plain, ensure_ascii=False, indent=2, allow_nan=False) + "\n")

    def error(self, error: MoetuneError, *, as_json: bool) -> None:
        """Print what went wrong and what to do next."""
        if as_json:
            self.document(
                {
                    "schema": "moetune.error/1",
                    "error": error.what,
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                }
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
        """Print on stdout without the blanks that rich fills lines up with."""
        console = self._console()
        with console.capture() as captured:
            console.print(renderable, width=width, soft_wrap=width is None)
        for line in captured.get().splitlines():
            sys.stdout.write(f"{line.rstrip()}\n")


def seconds_span(seconds: float, low: float, high: float) -> str:
    """Return "21.4 ms (20.6–22.5)": the range in the unit and with the digits of the value."""
    number, _, unit = format_seconds(seconds).partition(" ")
    factor = dict(_SECONDS)[unit]
    digits = len(number.partition(".")[2])
    return f"{number} {unit} ({low / factor:.{digits}f}–{high / factor:.{digits}f})"


def percent(share: float) -> str:
    """Return "12.3 %"."""
    return f"{100 * share:.1f} %"


def plural(count: int, noun: str) -> str:
    """Return "1 chunk" or "2 chunks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
