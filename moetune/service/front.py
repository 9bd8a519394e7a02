"""The outermost layer: a number for each request, its log line, its metrics, and the headers."""

import logging
import re
import secrets
from collections.abc import Mapping
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetune.service.metrics import Metrics
from moetune.service.problems import defect, problem_response

REQUEST_ID_HEADER = b"x-request-id"
_CONTENT_SECURITY_POLICY = (
    b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    b"frame-ancestors 'none'"
)
"""No script and no style but from the service's own files: not even plotly.js needs another."""
SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _CONTENT_SECURITY_POLICY),
)
_KNOWN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_GONE = 499
_FAILED = 500
_REQUEST_ID = "moetune.request_id"
_log = logging.getLogger("moetune.service")


class Front:
    """Middleware around everything: what leaves the service has passed it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what nobody foresaw becomes a 500 that names the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_REQUEST_ID] = request_id = _request_id(scope)
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
            self._note(scope, answer.status or _GONE, perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        self._metrics.answered(
            method=scope["method"], route=route_of(scope), status=status, seconds=seconds
        )
        if _log.isEnabledFor(logging.INFO):
            _log.info("request", extra={"fields": _fields(scope, status, seconds)})


class _Answer:
    """Sends an answer on, with the headers that every one carries.

    Args:
        status: of the answer, 0 until it begins.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        self._own = ((REQUEST_ID_HEADER, request_id.encode()), *SECURITY_HEADERS)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.get("headers", ())
            given = {name for name, _ in headers}
            more = (pair for pair in self._own if pair[0] not in given)
            message = {**message, "headers": [*headers, *more]}
        await self._send(message)


def request_id_of(scope: Scope) -> str:
    """Return the number of the request, for its log and its errors."""
    return str(scope.get(_REQUEST_ID, ""))


def route_of(scope: Scope) -> str:
    """Return the pattern that the address matched, "" for none: there are few of them."""
    return str(getattr(scope.get("route"), "path", ""))


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _KNOWN_ID.fullmatch(value):
            return str(value.decode())
    return secrets.token_hex(8)


def _fields(scope: Scope, status: int, seconds: float) -> Mapping[str, object]:
    """Return what the log says of a request: never its query, headers or body."""
    client = scope.get("client") or ("", 0)
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return {
        "request_id": request_id_of(scope),
        "method": scope["method"],
        "path": raw.partition(b"?")[0].decode("ascii", errors="backslashreplace"),
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0],
    }
