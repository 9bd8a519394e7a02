"""Requests to a plan service over HTTP, below the `client` of plans and the `reports` of calls.

A request is bounded in time and size, and goes to one host alone: `http.client` ignores proxies of
the environment and follows no redirections, which would get the token.
"""

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from urllib.parse import urlsplit

from moetune.domain.document import canonical_json

TIMEOUT_SECONDS = 2.0
MAX_BYTES = 16 * 2**20
"""The longest answer that is read."""

_READ_BYTES = 2**16
_MAX_CHARACTERS = 400
_LATER = frozenset({408, 425, 429})
_GOOD, _REDIRECTIONS = range(200, 300), range(300, 400)
_SERVER_FAULT = 500

_LOGGER = logging.getLogger("moetune")


class ServiceError(Exception):
    """The service gave no good answer; the text is the end of a sentence that begins with its URL.

    Args:
        status: the HTTP status, None where there was no whole answer.
    """

    def __init__(self, what: str, *, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether another try would get the same answer."""
        if self.status is None or self.status in _LATER:
            return False
        return self.status < _SERVER_FAULT


class ServiceConnection:
    """Sends requests to one service.

    Args:
        url: as `check_service_url` returns it.
        token: sent with every request, if any.
        timeout_seconds: of one request, from the look-up of the host's name to the last byte.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.url = url
        self._address, self._timeout_seconds = urlsplit(url), timeout_seconds
        self._headers = {
            "Accept": "application/json", "User-Agent": "moetune", "Connection": "close"
        }  # fmt: skip
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def request(self, path: str, document: object = None) -> bytes:
        """Send a document, or GET without one, and return the body of the answer.

        Raises:
            ServiceError: there was no good answer.
        """
        sent = None if document is None else canonical_json(document).encode()
        return _within(self._timeout_seconds, lambda: self._exchange(path, sent))

    def _exchange(self, path: str, sent: bytes | None) -> bytes:
        end_seconds = time.monotonic() + self._timeout_seconds
        is_tls = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        method, headers = "GET", self._headers
        if sent is not None:
            method, headers = "POST", {**headers, "Content-Type": "application/json"}
        try:
            connection = kind(
                self._address.hostname or "", self._address.port, timeout=self._timeout_seconds
            )
            with closing(connection):
                connection.request(method, self._address.path + path, sent, headers)
                with connection.getresponse() as response:
                    body = _read(response, end_seconds)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceError(_reason(error)) from None
        if response.status not in _GOOD:
            raise _refusal(response, body)
        return body


def _within(seconds: float, call: Callable[[], bytes]) -> bytes:
    """Return the result of `call` if it comes in time; else raise, while it ends by itself.

    A socket's timeout bounds neither the look-up of a name nor an answer that trickles.

    Raises:
        ServiceError: there was no result in time, or `call` or its thread failed.
    """
    outcome: Future[bytes] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True, name="moetune plan service").start()
        return outcome.result(seconds)
    except TimeoutError:
        raise ServiceError(f"no answer within {seconds:g} s") from None
    except ServiceError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever happened, the job goes on
        raise ServiceError(f"it cannot be asked: {printable(repr(error))}") from None


def _read(response: http.client.HTTPResponse, end_seconds: float) -> bytes:
    """Return the body, with the time checked after each read: an answer may trickle for ever."""
    body = bytearray()
    while part := response.read1(_READ_BYTES):
        body += part
        if len(body) > MAX_BYTES:
            raise ServiceError(f"its answer is longer than {MAX_BYTES:,} bytes", status=200)
        if time.monotonic() > end_seconds:
            raise TimeoutError
    if response.length:
        raise ServiceError("its answer was cut off")
    return bytes(body)


def _refusal(response: http.client.HTTPResponse, body: bytes) -> ServiceError:
    """Return the error with the text of a problem document (RFC 9457), else the reason phrase."""
    status = response.status
    if status in _REDIRECTIONS:
        where = _host(response.headers.get("Location", ""))
        what = f"it sends elsewhere{where} ({status}), and redirections are not followed"
        return ServiceError(what, status=status)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    problem = document if isinstance(document, dict) else {}
    texts = [problem.get("detail") or problem.get("title") or response.reason, problem.get("hint")]
    words = printable("; ".join(text for text in texts if text and isinstance(text, str)))
    return ServiceError(f"it answers {status}: {words}".removesuffix(": "), status=status)


def _host(location: str) -> str:
    """Return the host of a redirection, without user name and password."""
    try:
        host = urlsplit(location).netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return f", to {printable(host)}" if host else ""


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
        words = f"no HTTP is spoken there, but {words.strip()!r}"
    return printable(words)


def printable(text: str) -> str:
    """Return a text of the service as one short line, fit for the log."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]} …"
