"""Exchanges with a plan service: single requests, and observations sent in the background.

A request is bounded in time and size and goes straight to one host: the proxies of the
environment are passed by and redirections are not followed, because the token would travel
with the request.
"""

import atexit
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from moetune.domain.document import canonical_json
from moetune.domain.records import Observation

TIMEOUT_SECONDS = 2.0
MOST_BYTES = 16 * 2**20
"""The longest answer that is read."""

_PIECE_BYTES = 2**16
_MOST_CHARACTERS = 400
_LATER = frozenset({408, 425, 429})
_REDIRECTIONS = range(300, 400)
_SERVER_FAULT = 500

_LOGGER = logging.getLogger("moetune")


class ServiceError(Exception):
    """The service gave no good answer: the text says why, as the end of a sentence.

    Args:
        status: the HTTP status, None where there was no whole answer.
    """

    def __init__(self, what: str, *, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether another try would get the same."""
        if self.status is None or self.status in _LATER:
            return False
        return self.status < _SERVER_FAULT


class ServiceConnection:
    """Sends requests to one service.

    Args:
        url: as `check_service_url` returns it.
        token: sent with every request, None for none.
        timeout_seconds: of every wait for the network, and of the whole body.
    """

    def __init__(
        self, url: str, token: str | None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._opener = build_opener(ProxyHandler({}), _NoRedirection())
        self._headers = {"Accept": "application/json", "User-Agent": "moetune"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str) -> bytes:
        """Return the body of an answer.

        Raises:
            ServiceError: there was no good answer.
        """
        return self._exchange(Request(self.url + path, headers=self._headers))  # noqa: S310 - http(s), see `url`

    def post(self, path: str, document: object) -> bytes:
        """Send a document and return the body of the answer.

        Raises:
            ServiceError: there was no good answer.
        """
        headers = {**self._headers, "Content-Type": "application/json"}
        body = canonical_json(document).encode()
        return self._exchange(Request(self.url + path, body, headers))  # noqa: S310 - as above

    def _exchange(self, request: Request) -> bytes:
        end_seconds = time.monotonic() + self._timeout_seconds
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                return _read(response, end_seconds)
        except HTTPError as error:
            with error:
                raise _refusal(error, end_seconds) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServiceError(_reason(error)) from None


class _NoRedirection(HTTPRedirectHandler):
    def http_error_302(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> None:
        """Follow no redirection: it becomes an `HTTPError`, whatever address it names."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _read(response: http.client.HTTPResponse, end_seconds: float) -> bytes:
    """Return the body, read piece by piece: one that trickles must not go on for ever."""
    body = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        body += piece
        if len(body) > MOST_BYTES:
            raise ServiceError(f"its answer is longer than {MOST_BYTES:,} bytes", status=200)
        if time.monotonic() > end_seconds:
            raise TimeoutError
    if response.length:
        raise ServiceError("its answer was cut off")
    return bytes(body)


def _refusal(error: HTTPError, end_seconds: float) -> ServiceError:
    status = error.code
    if status in _REDIRECTIONS:
        where = _host(error.headers.get("Location", ""))
        what = f"it sends elsewhere{where} ({status}), and redirections are not followed"
        return ServiceError(what, status=status)
    words = _words(error, end_seconds)
    what = f"it answers {status}: {words}" if words else f"it answers {status}"
    return ServiceError(what, status=status)


def _host(location: str) -> str:
    """Return where a redirection leads, without a name and a password."""
    try:
        host = urlsplit(location).netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return f", to {printable(host)}" if host else ""


def _words(error: HTTPError, end_seconds: float) -> str:
    """Return what a problem document says (RFC 9457), else the status's own words."""
    try:
        body = _read(cast("http.client.HTTPResponse", error.fp), end_seconds)
        document = json.loads(body)
    except (OSError, http.client.HTTPException, ServiceError, ValueError, RecursionError):
        document = None
    found = document if isinstance(document, dict) else {}
    said = [found.get("detail") or found.get("title") or error.reason, found.get("hint")]
    return printable("; ".join(one for one in said if one and isinstance(one, str)))


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    if isinstance(cause, http.client.BadStatusLine) and not isinstance(cause, OSError):
        words = f"no HTTP is spoken there, but {words.strip()!r}"
    return printable(words)


def printable(text: str) -> str:
    """Return a foreign text as it may be logged: one line, and not a long one."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} …"


MOST_WAITING = 1000
"""The longest batch, too: a service takes no more at once."""
CLOSING_SECONDS = 2.0


class ObservationSender:
    """Sends observations in a thread of its own, in batches.

    Observations that find the queue full or the service away are dropped and counted. The log
    says so the first time, and how many there were at the end.

    Args:
        send: sends a batch, at most `most_waiting` observations; it raises where it fails.
        interval_seconds: between two batches.
        pause_seconds: the same after one that failed.
        is_quiet: the log has said already that the service is away.

    Attributes:
        num_sent, num_dropped: observations.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Observation]], None],
        *,
        most_waiting: int = MOST_WAITING,
        interval_seconds: float = 5.0,
        pause_seconds: float = 30.0,
        is_quiet: bool = False,
    ) -> None:
        self.num_sent = self.num_dropped = 0
        self._send = send
        self._most_waiting = most_waiting
        self._interval_seconds, self._pause_seconds = interval_seconds, pause_seconds
        self._is_quiet = is_quiet
        self._waiting: list[Observation] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, observation: Observation) -> None:
        """Take an observation to send, or drop it; returns at once."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._most_waiting:
                self.num_dropped += 1
                return
            self._waiting.append(observation)
            self._changed.notify()
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Send what waits, for two seconds at most, and take no more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)
        with self._changed:
            self.num_dropped += len(self._waiting)
            self._waiting = []
            if self.num_dropped:
                _LOGGER.info("%d observations sent, %d dropped", self.num_sent, self.num_dropped)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, daemon=True, name="moetune observations")
        try:
            thread.start()
        except RuntimeError:  # no threads left: tried again with the next observation
            return
        self._thread = thread
        atexit.register(self.close)

    def _run(self) -> None:
        while batch := self._take():
            pause_seconds = self._deliver(batch)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause_seconds)

    def _take(self) -> list[Observation]:
        """Wait for observations and return all that there are; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            batch, self._waiting = self._waiting, []
            return batch

    def _deliver(self, batch: list[Observation]) -> float:
        """Send a batch and return how long to wait before the next."""
        try:
            self._send(batch)
        except Exception as error:  # noqa: BLE001 - training goes on whatever happens here
            with self._changed:
                self.num_dropped += len(batch)
            if not self._is_quiet:
                self._is_quiet = True
                _LOGGER.warning(
                    "observations do not reach the plan service: %s\n"
                    "  training goes on; they are dropped until it takes them again",
                    error,
                )
            return self._pause_seconds
        with self._changed:
            self.num_sent += len(batch)
        return self._interval_seconds
