"""Limits on connections: their number, a request's time to arrive, and the size of its headers.

Uvicorn's quick parser has no such limits. The protocol below adds a count of the bytes outside of
bodies, and a timer per connection while a request arrives. A connection beyond a limit is aborted.
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
"""Most bytes of the request line, the headers, and the framing of a body's chunks."""
_FRAMES_PER_BYTE = 8
"""Allowed bytes of framing for each byte of a body: a chunk of one byte has five."""


def most_connections() -> int:
    """Return the number of connections that this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if soft == resource.RLIM_INFINITY else soft - _RESERVED_DESCRIPTORS
    return min(_MOST, max(_FEWEST, 4 * most // 5))


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits; a connection too many aborts the longest idle connection."""

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
        """Begin to wait for a request; abort a connection if there are too many."""
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
        """Cancel the timer."""
        self._allowed = None
        self._set_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse new bytes; the limit counts those outside of bodies."""
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
        """Count the bytes of the body separately."""
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
