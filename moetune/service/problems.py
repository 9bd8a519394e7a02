"""Errors as RFC 9457 problem documents, with one table from error classes to HTTP statuses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType

from starlette.responses import Response

from moetune.domain.errors import (
    BusyError,
    InfeasiblePlanError,
    InputError,
    MoetuneError,
    NotAuthorisedError,
    NotFoundError,
    ProfileError,
    QualityError,
    SchemaMismatchError,
    SolveLimitError,
    StoreUnavailableError,
)

PROBLEM_SCHEMA = "moetune.problem/1"
MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 2
_MAX_CHARACTERS = 2000


class UnreadableBodyError(InputError):
    """A body that is not JSON or TOML, or was cut short."""


class MediaTypeError(InputError):
    """A body of a media type that the address does not accept."""


class UnknownHostError(InputError):
    """A Host header with a name that is not the service's."""


class ForbiddenError(NotAuthorisedError):
    """A request that its token, or the page it comes from, may not make."""


class TooLargeError(InputError):
    """A body larger than the service accepts."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"the body is larger than the {max_bytes:,} bytes that this service accepts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as status line, headers and body.

    Args:
        code: the command line's exit code for it.
    """

    status: HTTPStatus
    title: str
    detail: str
    code: int
    hint: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


_TABLE: Mapping[type[MoetuneError], tuple[HTTPStatus, str]] = MappingProxyType(
    {
        UnreadableBodyError: (HTTPStatus.BAD_REQUEST, "unreadable body"),
        NotAuthorisedError: (HTTPStatus.UNAUTHORIZED, "not authorised"),
        ForbiddenError: (HTTPStatus.FORBIDDEN, "not allowed"),
        NotFoundError: (HTTPStatus.NOT_FOUND, "not found"),
        InfeasiblePlanError: (HTTPStatus.CONFLICT, "no feasible plan"),
        TooLargeError: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request entity too large"),
        MediaTypeError: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unknown kind of body"),
        UnknownHostError: (HTTPStatus.MISDIRECTED_REQUEST, "unknown host"),
        InputError: (HTTPStatus.UNPROCESSABLE_ENTITY, "bad input"),
        BusyError: (HTTPStatus.TOO_MANY_REQUESTS, "too many questions"),
        SolveLimitError: (HTTPStatus.GATEWAY_TIMEOUT, "answer takes too long"),
        ProfileError: (HTTPStatus.FAILED_DEPENDENCY, "profile missing or stale"),
        QualityError: (HTTPStatus.FAILED_DEPENDENCY, "quality gate failed"),
        SchemaMismatchError: (HTTPStatus.SERVICE_UNAVAILABLE, "database schema mismatch"),
        StoreUnavailableError: (HTTPStatus.SERVICE_UNAVAILABLE, "database not available"),
        MoetuneError: (HTTPStatus.SERVICE_UNAVAILABLE, "not available"),
    }
)


_RETRY = {"Retry-After": str(RETRY_AFTER_SECONDS)}
_HEADERS: Mapping[HTTPStatus, Mapping[str, str]] = MappingProxyType({
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: {"Connection": "close"},
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="moetune"'},
    HTTPStatus.SERVICE_UNAVAILABLE: _RETRY, HTTPStatus.TOO_MANY_REQUESTS: _RETRY,
})  # fmt: skip
STATUSES = frozenset(status for status, _ in _TABLE.values())


def problem_of(error: MoetuneError) -> Problem:
    """Return the problem of an error, by its nearest class in the table."""
    kind = next(kind for kind in type(error).__mro__ if kind in _TABLE)
    status, title = _TABLE[kind]
    return Problem(
        status=status, title=title, detail=error.what, code=error.exit_code, hint=error.hint,
        headers=_HEADERS.get(status, {}),
    )  # fmt: skip


def defect(request_id: str) -> Problem:
    """Return the problem of an unexpected exception, whose traceback is in the log."""
    return Problem(
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        title="defect",
        detail="moetune failed to answer this request",
        code=MoetuneError.exit_code,
        hint=f"this is a defect of moetune: report it with the log of request {request_id}",
    )


def problem_response(problem: Problem) -> Response:
    """Return the problem as a response."""
    document = {
        "schema": PROBLEM_SCHEMA,
        "type": f"urn:moetune:problem:{problem.title.replace(' ', '-')}",
        "title": problem.title,
        "status": int(problem.status),
        "detail": _shorten(problem.detail),
        "code": problem.code,
        "hint": _shorten(problem.hint),
    }
    return Response(
        json.dumps(document), int(problem.status), dict(problem.headers), media_type=MEDIA_TYPE
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"
