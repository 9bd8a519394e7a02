"""Contents of requests and answers: parameters, bodies within limits, documents, pages, ETags.

Values in bodies are checked by the domain, whose errors help more than a schema's.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moetune.domain.document import canonical_json, decode, encode
from moetune.domain.errors import InputError
from moetune.service.problems import MediaTypeError, UnreadableBodyError
from moetune.service.workers import WorkerPools

T = TypeVar("T")
_NEXT = "`next` of the previous page."
Limit = Annotated[int, Query(ge=1, le=500, description="Largest number of entries.")]
PlanId = Annotated[str, Path(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]
RowCursor = Annotated[int, Query(ge=0, le=2**63 - 1, description=_NEXT)]
PlanCursor = Annotated[str, Query(pattern="^([0-9a-f]{64})?$", description=_NEXT)]
JSON = "application/json"
TOML = "application/toml"
FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 100
_MAX_DEPTH = 32
_MAX_WHOLE_NUMBER = 2**63 - 1


def document(
    value: object, *, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a value as a JSON document."""
    return Response(canonical_json(value) + "\n", status, headers, media_type=JSON)


def page(
    schema: str, rows: Sequence[Any], *, limit: int, documents: Callable[[Any], object] = encode
) -> Response:
    """Return a page of a list, with the cursor of the next page under `next`.

    Args:
        rows: up to `limit` + 1; the extra row shows that there is a next page.
        documents: encodes rows as documents.
    """
    items = rows[:limit]
    next_page = str(items[-1].id) if len(rows) > limit else None
    return document({"schema": schema, "items": documents(items), "next": next_page})


def with_etag(text: str, if_none_match: str | None) -> Response:
    """Return a JSON text with its ETag, or 304 if the client has it already."""
    content = text.encode()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": etag}
    # Tags are compared weakly, as in RFC 9110, section 13.1.2.
    tags = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
    if tags & {etag, "*"}:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(content, headers=headers, media_type=JSON)


async def read_body(request: Request, *, kinds: Collection[str]) -> tuple[str, bytes]:
    """Return the body's media type and bytes.

    The Content-Type is required: a form on another site's page cannot send JSON's.

    Raises:
        MediaTypeError: the Content-Type is none of `kinds`, or missing.
        HTTPException: the body is larger than the service accepts.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise MediaTypeError(
            f"the Content-Type is {kind!r}" if kind else "the header Content-Type is missing",
            f"send {' or '.join(kinds)}",
        )
    return kind, await request.body()


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a page's form by name; the last value of a repeated field counts.

    Raises:
        MediaTypeError: the body is not a form of this kind.
        UnreadableBodyError: the form is broken, or has more fields than a page sends.
    """
    await read_body(request, kinds=(FORM,))
    try:
        form = await request.form(max_fields=_MOST_FIELDS)
        return {name: value for name, value in form.multi_items() if isinstance(value, str)}
    except HTTPException as error:
        raise UnreadableBodyError(f"the form cannot be read: {error.detail}") from None


async def read_document(request: Request, pools: WorkerPools, kind: type[T]) -> T:
    """Return the document in a body of JSON, or raise InputError that names the key."""
    _, content = await read_body(request, kinds=(JSON,))
    return await pools.read(lambda: decode(kind, parse_json(content), "the body"))


def parse_json(content: bytes) -> object:
    """Return the values of a JSON text, or raise UnreadableBodyError; see also `check_values`."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UnreadableBodyError(f"the body is not valid JSON: {error}") from None
    check_values(value)
    return value


def check_values(value: object, depth: int = 0) -> None:
    """Check parsed values before they are decoded: their depth and the range of their numbers.

    Raises:
        UnreadableBodyError: nested too deeply.
        InputError: a number that is not finite or does not fit 64 bits.
    """
    if isinstance(value, (Mapping, list)):
        if depth == _MAX_DEPTH:
            raise _too_deep()
        for item in value.values() if isinstance(value, Mapping) else value:
            check_values(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"the body holds {value}, which is not a finite number")
    elif isinstance(value, int) and abs(value) > _MAX_WHOLE_NUMBER:
        raise InputError("the body holds an integer beyond 64 bits")


def _too_deep() -> UnreadableBodyError:
    return UnreadableBodyError(f"the body is nested more than {_MAX_DEPTH} levels deep")
