"""Rendering of answers, notes and errors on a terminal, and of JSON."""

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from moetune.domain.document import ErrorDocument, encode
from moetune.domain.errors import MoetuneError, PricedPlanError
from moetune.report.section import Section, values_of
from moetune.report.text import SectionPrinter

_TRACEBACK_VERBOSITY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen(SectionPrinter):
    """Output of a command: answers on stdout, notes and errors on stderr.

    Args:
        as_json: print answers as JSON, in place of words and tables.
    """

    as_json: bool = False
    quiet: bool = False
    verbosity: int = 0

    def line(self, text: str) -> None:
        """Print one line of the answer without wrapping, such as a path or a command."""
        self._console().print(text, soft_wrap=True, markup=False, highlight=False)

    def raw(self, text: str) -> None:
        """Print text as it is, such as that of a file."""
        sys.stdout.write(text)

    def answer(
        self, sections: Iterable[Section], document: Mapping[str, object] | None = None
    ) -> None:
        """Print sections in words and tables, or their values and those of `document` as JSON."""
        if self.as_json:
            self.document({**(document or {}), "sections": [values_of(part) for part in sections]})
        else:
            self.sections(sections)

    def show(self, document: object, view: Callable[[], Iterable[Section]]) -> None:
        """Print a JSON document, or the sections of `view`, which is called only then."""
        if self.as_json:
            self.document(document)
        else:
            self.sections(view())

    def result(self, document: Mapping[str, object], *lines: str) -> None:
        """Print what a command has done: its JSON document, or the lines that say it."""
        if self.as_json:
            self.document(document)
            return
        for line in lines:
            self.line(line)

    def note(self, text: str) -> None:
        """Print a line on stderr, unless quiet."""
        if not self.quiet:
            self._console(stderr=True).print(text, soft_wrap=True, markup=False, highlight=False)

    def hint(self, text: str) -> None:
        """Print a next step on stderr, unless quiet or as JSON."""
        if not self.as_json:
            self.note(text)

    def detail(self, text: str) -> None:
        """Print a line on stderr with -v."""
        if self.verbosity:
            self.note(text)

    def document(self, value: object) -> None:
        """Print one JSON document on stdout."""
        plain = encode(value)
        sys.stdout.write(json.dumps(plain, ensure_ascii=False, indent=2, allow_nan=False) + "\n")

    def error(self, error: MoetuneError) -> None:
        """Print an error and its hint on stderr, and as JSON also on stdout."""
        if self.as_json:
            plan = error.plan if isinstance(error, PricedPlanError) else None
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
