"""One page before it is rendered, and the data of its figures as files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.responses import Response

from moetune.domain.errors import NotFoundError
from moetune.report.section import Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A template with its context.

    Args:
        pictures: the figures on it.
    """

    template: str
    context: Mapping[str, object]
    pictures: Sequence[Picture] = ()
    status: int = 200


def csv_answer(pictures: Sequence[Picture], name: str) -> Response:
    """Return the data of one figure as a file.

    Raises:
        NotFoundError: the page has no such figure.
    """
    found = next((one for one in pictures if one.name == name), None)
    if found is None:
        known = ", ".join(one.name for one in pictures) or "it has none"
        raise NotFoundError(f"the page has no figure {name!r}", f"figures: {known}")
    return Response(
        found.csv,
        media_type="text/csv; charset=utf-8",
        headers={
            "Content-Disposition": f'attachment; filename="{found.name}.csv"',
            "Cache-Control": "no-cache",
        },
    )


def address(*parts: str, **query: str) -> str:
    """Return "/part/part?name=value", escaped; values that are empty are left out."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    pairs = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(pairs)}" if pairs else path
