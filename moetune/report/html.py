"""HTML of sections: Jinja templates, and the report as one file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError
from moetune.domain.units import format_bytes
from moetune.report.section import Section
from moetune.report.svg import STATIC, figure_svg

if TYPE_CHECKING:
    from jinja2 import Environment


FOLDER = Path(__file__).resolve().parent
_COLORS = re.compile(r"--\w+: light-dark\(.*\);")
_COMMAND = re.compile(r"`([^`]+)`|(?<=:  )((?:moetune|torchrun|git|pip) .*?)(?=\.?$)", re.MULTILINE)
_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|[mµn]?s|[KMGT]i?B|[KMGTP]?FLOP/s)(?![\w/]))")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_FLAG = re.compile(r"--[a-z][a-z-]*")


def environment(*folders: Path) -> "Environment":
    """Return a Jinja environment that escapes, with templates of folders and of this package.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MoetuneError(
            "pages need Jinja2, which is not installed", "pip install 'moetune[report]'"
        ) from None
    made = Environment(
        loader=FileSystemLoader([*folders, FOLDER / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"bytes": format_bytes, "figure_svg": figure_svg, "ticked": _mark_commands}
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A profile or a plan in a report.

    Args:
        name: of letters, digits and hyphens; unique in the report.
        short: title in the list of contents.
        scope: sizes and machine in one line.
        sections: the first section's title is omitted, as it repeats the chapter's.
    """

    name: str
    short: str
    title: str
    scope: str
    sections: tuple[Section, ...]


def report_page(*, title: str, chapters: Sequence[Chapter]) -> str:
    """Return the report as one HTML file with its style, script and figures.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    return environment().get_template("report.html").render(
        title=title,
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=version("moetune"),
        style=(STATIC / "moetune.css").read_text(encoding="utf-8"),
        script=(STATIC / "moetune.js").read_text(encoding="utf-8"),
        chapters=chapters,
    )  # fmt: skip


def notebook_cell(*, name: str, sections: Sequence[Section], more: Sequence[Section] = ()) -> str:
    """Return a notebook cell of sections without their figures, with styles and no script.

    Args:
        name: of letters, digits and hyphens; unique in the notebook.
        more: sections behind a line that unfolds them.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    colors = _COLORS.findall((STATIC / "moetune.css").read_text(encoding="utf-8"))
    return environment().get_template("notebook.html").render(
        name=name,
        colors="\n  ".join(colors),
        style=(STATIC / "notebook.css").read_text(encoding="utf-8"),
        sections=[replace(section, figures=()) for section in sections],
        more=[replace(section, figures=()) for section in more],
        summary="Why, and what else",
    )  # fmt: skip


def _mark_commands(text: str) -> str:
    """Return escaped text with commands set as code, and numbers joined to their units."""
    from markupsafe import Markup, escape

    def code(match: re.Match[str]) -> str:
        words = _FLAG.sub(r'<span class="whole">\g<0></span>', match[1] or match[2])
        return f"<code>{words}</code>"

    marked = _UNIT.sub("\u00a0", str(escape(text)))
    marked = _DATE.sub(r'<span class="whole">\g<0></span>', marked)
    return Markup(_COMMAND.sub(code, marked))  # noqa: S704 - escaped
