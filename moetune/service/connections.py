"""Limits on connections: how many, how long a request may take to arrive, how long its headers are.

Uvicorn has none of them. The protocol below is uvicorn's own with a count of the bytes that are no
body, and one timer a connection while a request arrives.
"""

import asyncio
import resource
import time
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_RESERVED_DESCRIPTORS = 128
"""For the database, the log, the processes that solve, and the listening socket."""
_FEWEST, _MOST = 16, 4096
_FRAMES_PER_BYTE = 8
"""Chunks of one byte have five bytes around them."""
_TOO_LONG = 431
_LATE = 408
_WORDS = {_TOO_LONG: b"431 Request Header Fields Too Large", _LATE: b"408 Request Timeout"}
Stage = Literal["idle", "headers", "body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of their number.

    Args:
        connections: open at once; for one more the longest idle one is closed.
        header_seconds: from the connection, or a request's first byte, to its last header.
        body_seconds: from there to the end of the body.
        header_bytes: of the request line and headers, and of what surrounds a body's chunks.
    """

    connections: int
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    header_bytes: int = 64 * 2**10


def most_connections() -> int:
    """Return the connections that this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if soft == resource.RLIM_INFINITY else soft - _RESERVED_DESCRIPTORS
    return min(_MOST, max(_FEWEST, 4 * most // 5))


def limited_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with these limits."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": limits})


class _LimitedProtocol(HttpToolsProtocol):
    limits: ClassVar[ConnectionLimits]
    _stage: Stage = "headers"
    _timed: Stage = "idle"
    _timer: asyncio.TimerHandle | None = None
    _framing_bytes = 0
    _body_bytes = 0
    _first_bytes = 0
    _since = 0.0
    _has_begun = False

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        if len(self.connections) > self.limits.connections:
            self._make_room()
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        # Of a request that begins with these bytes they count whole; of a second one behind it not.
        self._first_bytes = 0 if self._has_begun else len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._framing_bytes > self.limits.header_bytes + _FRAMES_PER_BYTE * self._body_bytes:
            self._refuse(_TOO_LONG)
            return
        if self._timed != self._stage:
            self._set_timer()

    def on_message_begin(self) -> None:
        self._stage, self._framing_bytes, self._body_bytes = "headers", self._first_bytes, 0
        self._first_bytes = 0
        self._has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_too_long():
            # The parser's next callbacks need a request: the error ends them, and answers.
            raise _TooLongError
        self._stage = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stage, self._since = "idle", time.monotonic()
        self._has_begun = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self.headers and self._stage == "headers" and self._is_too_long():
            self._refuse(_TOO_LONG)
        else:
            super().send_400_response(msg)

    def _is_too_long(self) -> bool:
        headers = self.headers or ()
        return (
            sum(len(name) + len(value) for name, value in headers) + len(getattr(self, "url", b""))
            > self.limits.header_bytes
        )

    def _set_timer(self) -> None:
        self._stop_timer()
        self._timed = self._stage
        if self._stage == "idle":
            return
        limits = self.limits
        seconds = limits.header_seconds if self._stage == "headers" else limits.body_seconds
        self._timer = self.loop.call_later(seconds, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._stage == "headers" and self._has_begun:
            self._refuse(_LATE)
        else:
            self.transport.abort()

    def _refuse(self, status: int) -> None:
        """Answer, where no request is being answered, and close."""
        self._stop_timer()
        if not self.is_idle:
            self.transport.abort()
            return
        words = _WORDS[status]
        self.transport.write(
            b"HTTP/1.1 " + words + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest; this one where all are answered."""
        others = (cast("_LimitedProtocol", one) for one in self.connections if one is not self)
        idle = [one for one in others if one.is_idle and not one.transport.is_closing()]
        (min(idle, key=lambda one: one._since) if idle else self).transport.abort()  # noqa: SLF001


class _TooLongError(Exception):
    pass
