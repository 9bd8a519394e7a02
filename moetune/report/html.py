"""HTML around figures: the templates' environment, and what they call."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError
from moetune.domain.units import format_bytes
from moetune.report.assets import FOLDER, STATIC, plotly_script
from moetune.report.picture import Picture

if TYPE_CHECKING:
    from jinja2 import Environment

_TICKED = re.compile(r"`([^`]+)`")
_AGES = (
    (86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute"),
)  # fmt: skip


def environment(*folders: Path) -> "Environment":
    """Return the templates of these folders and of this package; everything is escaped.

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
    made.filters |= {
        "bytes": format_bytes,
        "figure_json": figure_json,
        "data_url": _data_url,
        "count": _count,
        "ticked": _ticked,
    }
    return made


def figure_json(picture: Picture) -> str:
    """Return the figure as JSON that cannot end the script element it stands in."""
    found = json.dumps(picture.figure, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def age(created_at: str, now: datetime) -> str:
    """Return "3 days ago" of a time of day in UTC; "" where there is none.

    Args:
        created_at: ISO 8601.
        now: with a time zone.
    """
    if not created_at:
        return ""
    passed = (now - datetime.fromisoformat(created_at)).total_seconds()
    for seconds, unit in _AGES:
        number = int(passed // seconds)
        if number:
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return "just now"


def report_page(
    *, title: str, made_at: str, version: str, views: Mapping[str, Sequence[object]]
) -> str:
    """Return one HTML file with everything in it: styles, scripts, figures and their data.

    Args:
        made_at: UTC, for the reader.
        views: what `report.html` shows.

    Raises:
        MoetuneError: plotly or Jinja2 is not installed.
    """
    return environment().get_template("report.html").render(
        title=title,
        made_at=made_at,
        version=version,
        style=(STATIC / "moetune.css").read_text(encoding="utf-8"),
        script=(STATIC / "moetune.js").read_text(encoding="utf-8"),
        plotly=plotly_script().file.read_text(encoding="utf-8"),
        csv_url=lambda picture: _data_url(picture.csv),
        **views,
    )  # fmt: skip


def _data_url(text: str) -> str:
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode()


def _ticked(text: str) -> str:
    """Return escaped text in which `this` is set as code."""
    from markupsafe import Markup, escape

    return Markup(_TICKED.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped


def _count(number: int) -> str:
    return f"{number:,}"
