"""ASGI middleware of every request: access rules inside, request ids and metrics outside."""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import perf_counter
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetune.app.solvers import CALLER
from moetune.domain.errors import MoetuneError, NotAuthorisedError
from moetune.service.access import Access, Right, check_site
from moetune.service.metrics import Metrics
from moetune.service.problems import (
    ForbiddenError,
    Problem,
    TooLargeError,
    UnknownHostError,
    defect,
    problem_of,
    problem_response,
)

COOKIE = "moetune_page"
LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
_OPEN_PATHS = frozenset({LOGIN_PATH, LOGOUT_PATH, "/healthz", "/readyz"})
_OPEN_FOLDER = "/static/"
_READING = frozenset({"GET", "HEAD"})
KEEP_PATH = "/new/keep"
_READING_POSTS = frozenset({"/v1/whatif", "/v1/check", "/check", "/new", KEEP_PATH})
"""POST paths that store nothing and need only the read token. The route of `KEEP_PATH` asks for the
write token itself, as a browser's session only reads."""
_RIGHT = "moetune.right"
_MAX_LENGTH_DIGITS = 18
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
"""An address in brackets, or a name, and a port."""


class AuthMiddleware:
    """Inner middleware: refuses requests that `Access` does not allow, and limits bodies.

    Args:
        refused: makes the answer with a problem, which is a page for a browser.
    """

    def __init__(
        self, app: ASGIApp, access: Access, refused: Callable[[Scope, Problem], Response]
    ) -> None:
        self._app, self._access, self._refused = app, access, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a refusal, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except MoetuneError as error:
            leads_on = isinstance(error, NotAuthorisedError) and _ask_to_log_in(scope)
            refusal = leads_on or self._refused(scope, problem_of(error))
            await refusal(scope, receive, send)
            return
        if scope["method"] not in _READING:
            receive = _Limited(receive, self._access.max_body_bytes)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise MoetuneError to refuse a request; else write its right into the scope."""
        given = headers.get("host", "")
        parts = _HOST.fullmatch(given)  # what is neither a name nor an address stays whole
        host = ((parts[1] or parts[2] or "") if parts else given).lower()
        if host not in self._access.hosts:
            raise UnknownHostError(
                f"{host!r} is not a name of this service",
                f"start it with `moetune serve --allow-host {host or 'NAME'}` to add it",
            )
        scope[_RIGHT] = right = self._right(headers)
        _check_right(scope, headers, right)
        length, largest = headers.get("content-length", "0"), self._access.max_body_bytes
        is_number = length.isascii() and length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS
        if not is_number or int(length) > largest:
            raise TooLargeError(largest)

    def _right(self, headers: Headers) -> Right:
        given = headers.get("authorization")
        if given is not None:
            kind, _, token = given.partition(" ")
            return self._access.right_of(token.strip() if kind.lower() == "bearer" else None)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if cookie and not self._access.is_open:
            return self._access.right_of_cookie(cookie)
        return self._access.right_of(None)


class _Limited:
    """A `receive` that raises once a chunked body, whose size is not sent, exceeds the limit."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._num_bytes = receive, max_bytes, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise TooLargeError(self._max_bytes)
        return message


def right_in(scope: Scope) -> Right:
    """Return the right that `AuthMiddleware` gave the request."""
    right: Right = scope.get(_RIGHT, "none")
    return right


def may_write(scope: Scope, access: Access, token: str) -> bool:
    """Return whether the request, or the token in its form, has the right to write."""
    return "write" in (right_in(scope), access.right_of(token))


def _check_right(scope: Scope, headers: Headers, right: Right) -> None:
    path, method = scope["path"], scope["method"]
    is_open = path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
    if not (is_open and method in _READING):
        check_site(headers, reads=method in _READING)
    if is_open:
        return
    if right == "none":
        given = "authorization" in headers
        raise NotAuthorisedError(
            "this is not a token of this service" if given else "a token is missing",
            "send the header  Authorization: Bearer TOKEN",
        )
    if right == "read" and method not in _READING and path not in _READING_POSTS:
        raise ForbiddenError("this token may only read", "send the service's write token instead")


def _ask_to_log_in(scope: Scope) -> Response | None:
    """Return a redirect to the login form for a browser, None for a program."""
    if scope["method"] not in _READING or not wants_page(scope):
        return None
    query = scope.get("query_string", b"").decode("latin-1")
    target = f"{scope['path']}?{query}" if query else scope["path"]
    return RedirectResponse(f"{LOGIN_PATH}?next={quote(target)}", HTTPStatus.SEE_OTHER)


def wants_page(scope: Scope) -> bool:
    """Return whether a browser asks for an address that is not for programs."""
    return "text/html" in Headers(scope=scope).get("accept", "") and not scope["path"].startswith(
        "/v1/"
    )


REQUEST_ID_HEADER = b"x-request-id"
_CONTENT_SECURITY_POLICY = (
    b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    b"frame-ancestors 'none'"
)
"""Scripts and styles come only from files of the service."""
SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _CONTENT_SECURITY_POLICY),
)
_REVALIDATED = (b"cache-control", b"private, no-cache")
"""A browser asks by ETag whether static files and plans have changed."""
_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_GONE = 499
_FAILED = 500
_REQUEST_ID = "moetune.request_id"
_log = logging.getLogger("moetune.service")


class _Caller:
    """The client that waits for an answer; it is watched after the body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._loop = receive, asyncio.get_running_loop()

    def watch(self) -> Callable[[], bool]:
        """Return a function that any thread may ask, until the answer, if the client hung up."""
        return asyncio.run_coroutine_threadsafe(self._until_gone(), self._loop).done

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class RequestMiddleware:
    """Outermost middleware: every answer passes it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; an unexpected exception becomes a 500 that names the request's id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_REQUEST_ID] = request_id = _request_id(scope)
        CALLER.set(_Caller(receive))
        answer = _Answer(send, request_id)
        started = perf_counter()
        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            pass
        except Exception:  # noqa: BLE001 - it is logged, and answered
            _log.exception("request %s failed", request_id)
            if not answer.status:
                await problem_response(defect(request_id))(scope, receive, answer)
            answer.status = _FAILED
        finally:
            self._record(scope, answer.status or _GONE, perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = str(getattr(scope.get("route"), "path", ""))  # its pattern: metrics need few values
        self._metrics.answered(method=scope["method"], route=route, status=status, seconds=seconds)
        if _log.isEnabledFor(logging.INFO):
            _log.info("request", extra={"fields": _fields(scope, status, seconds)})


class _Answer:
    """A `send` that adds the headers of every answer and stores its status, 0 until then."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        mark = (REQUEST_ID_HEADER, request_id.encode())
        self._headers = (mark, _REVALIDATED, *SECURITY_HEADERS)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            given = {name for name, _ in headers}
            more = (pair for pair in self._headers if pair[0] not in given)
            message = {**message, "headers": [*headers, *more]}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _SAFE_ID.fullmatch(value):
            return str(value.decode())
    return secrets.token_hex(8)


def _fields(scope: Scope, status: int, seconds: float) -> Mapping[str, object]:
    """Return a request's fields for the log, without query, headers and body: they hold secrets."""
    client = scope.get("client") or ("", 0)
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return {
        "request_id": str(scope.get(_REQUEST_ID, "")),
        "method": scope["method"],
        "path": raw.partition(b"?")[0].decode("ascii", errors="backslashreplace"),
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0],
    }
