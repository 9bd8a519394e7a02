"""Bodies of requests: JSON or TOML to plain values, or an error that says what is wrong."""

import json
import math
from collections.abc import Collection, Mapping

from starlette.requests import Request

from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.service.office import Office
from moetune.service.problems import MediaTypeError, UnreadableBodyError

JSON = "application/json"
TOML = "application/toml"
_MAX_DEPTH = 32
_MAX_WHOLE_NUMBER = 2**63 - 1


async def read_body(request: Request, *, kinds: Collection[str]) -> tuple[str, bytes]:
    """Return the body's media type and bytes.

    JSON has to call itself so: a form of another site's page cannot.

    Args:
        kinds: the media types that the address takes.

    Raises:
        MediaTypeError: the body calls itself something else, or nothing.
        HTTPException: it is longer than the service takes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise MediaTypeError(
            f"the body is {kind!r}" if kind else "the header Content-Type is missing",
            f"send {' or '.join(kinds)}",
        )
    return kind, await request.body()


async def read_document(request: Request, office: Office, *, schema: str) -> dict[str, object]:
    """Return the keys and values of a JSON object, without its `schema`.

    Args:
        schema: the only one that is taken; a body may leave it out.

    Raises:
        InputError: the body is too long, no JSON, no object or in another schema.
    """
    _, content = await read_body(request, kinds=(JSON,))
    document = await office.read(parse_json, content)
    if not isinstance(document, dict):
        raise InputError("the body must be a JSON object")
    found = document.pop("schema", schema)
    if found != schema:
        raise InputError(
            f"the body has schema {shown(found)}, this address takes {schema!r}",
            "GET /openapi.json describes it",
        )
    return document


def parse_json(content: bytes) -> object:
    """Return the plain values of a JSON text.

    Raises:
        UnreadableBodyError: it is none, or is nested too deeply.
        InputError: a number that is not finite or does not fit 64 bits.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UnreadableBodyError(f"the body is not valid JSON: {error}") from None
    check_values(value)
    return value


def check_values(value: object, *, depth: int = _MAX_DEPTH) -> None:
    """Refuse what no plan, profile or observation holds, before anything is made of it.

    Raises:
        UnreadableBodyError: nested too deeply.
        InputError: a number that is not finite or does not fit 64 bits.
    """
    if isinstance(value, (Mapping, list)):
        if not depth:
            raise _too_deep()
        for item in value.values() if isinstance(value, Mapping) else value:
            check_values(item, depth=depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"the body holds {value}, which is no number")
    elif isinstance(value, int) and abs(value) > _MAX_WHOLE_NUMBER:
        raise InputError("the body holds a whole number beyond 64 bits")


def _too_deep() -> UnreadableBodyError:
    return UnreadableBodyError(f"the body is nested more than {_MAX_DEPTH} levels deep")
