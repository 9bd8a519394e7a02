"""Answers: the command line's documents as responses, and pages of lists."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TypeVar

from starlette.responses import Response

from moetune.domain.document import canonical_json, encode

T = TypeVar("T")
_REVALIDATE = "private, no-cache"


def document(
    value: object,
    *,
    status: HTTPStatus = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a value as one JSON document."""
    return Response(canonical_json(value) + "\n", status, headers, media_type="application/json")


def page(schema: str, rows: Sequence[T], *, limit: int, cursor: Callable[[T], object]) -> Response:
    """Return one page of a list, and where the next one begins.

    Args:
        rows: one more than `limit` where there is a next page.
        cursor: of the last row that was seen.
    """
    items = rows[:limit]
    next_page = str(cursor(items[-1])) if len(rows) > limit else None
    return document({"schema": schema, "items": encode(items), "next": next_page})


def tagged(text: str, if_none_match: str | None) -> Response:
    """Return a JSON text with its ETag, or nothing where the client has it already."""
    content = text.encode()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": _REVALIDATE}
    if if_none_match is not None and _matches(etag, if_none_match):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(content, headers=headers, media_type="application/json")


def _matches(etag: str, header: str) -> bool:
    """Return whether the header names the tag; a weak one does as well (RFC 9110 §13.1.2)."""
    named = (one.strip().removeprefix("W/") for one in header.split(","))
    return header.strip() == "*" or etag in named
