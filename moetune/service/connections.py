"""Limits on connections: how many, how long a request may take to arrive, how long its headers are.

Uvicorn's quick parser has none of them. The protocol below is uvicorn's own with a count of the
bytes that are no body, and one timer a connection while a request arrives; who is beyond a limit
is cut off.
"""

import asyncio
import resource
import time
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_RESERVED_DESCRIPTORS = 128
"""Descriptors for the database, the log, the solving processes and the listening socket."""
_FEWEST, _MOST = 16, 4096
_HEADER_SECONDS = 10.0
"""Longest time from the connection, or a request's first byte, to its last header."""
_BODY_SECONDS = 60.0
_HEADER_BYTES = 64 * 2**10
"""Most bytes of the request line and headers, and of what surrounds a body's chunks."""
_FRAMES_PER_BYTE = 8
"""Chunks of one byte have five bytes around them."""


def most_connections() -> int:
    """Return the connections that this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if soft == resource.RLIM_INFINITY else soft - _RESERVED_DESCRIPTORS
    return min(_MOST, max(_FEWEST, 4 * most // 5))


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits; for one connection too many the longest idle one goes."""

    most: ClassVar[int] = most_connections()
    _timer: asyncio.TimerHandle | None = None
    _timed: float | None = None
    _allowed: float | None = _HEADER_SECONDS
    _framing_bytes = 0
    _body_bytes = 0
    _since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._since = time.monotonic()
        self._set_timer()
        if len(self.connections) > self.most:
            peers = (
                cast("LimitedProtocol", protocol)
                for protocol in self.connections
                if protocol is not self
            )
            idle = [
                protocol
                for protocol in peers
                if protocol.is_idle and not protocol.transport.is_closing()
            ]
            min(idle, key=lambda protocol: protocol._since, default=self).transport.abort()  # noqa: SLF001

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._allowed = None
        self._set_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come; the limit counts what is left of it when it is parsed."""
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._framing_bytes > _HEADER_BYTES + _FRAMES_PER_BYTE * self._body_bytes:
            self.transport.abort()
        elif self._timed != self._allowed:
            self._set_timer()

    def on_message_begin(self) -> None:
        """Begin to wait for the headers."""
        self._allowed = _HEADER_SECONDS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to wait for the body."""
        self._allowed = _BODY_SECONDS
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the body apart."""
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request for as long as uvicorn does."""
        self._allowed = None
        self._since, self._framing_bytes, self._body_bytes = time.monotonic(), 0, 0
        super().on_message_complete()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timed = None, self._allowed
        if self._allowed is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._allowed, self.transport.abort)
