"""TLS with limits: on handshakes that are slow, and on how many there may be at once.

Uvicorn's own TLS counts a connection once its handshake is over: silent ones before that would
take every descriptor.
"""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import ClassVar

from moetune.service.connections import ConnectionLimits


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a certificate chain and its key.

    Raises:
        OSError, ValueError: they cannot be read, do not match, or have a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, _no_password)
    return context


def tls_protocol(
    inner: type[asyncio.Protocol], context: ssl.SSLContext, limits: ConnectionLimits
) -> type[asyncio.Protocol]:
    """Return a protocol that ends TLS in front of `inner`, which gets the decrypted bytes."""
    members = {"inner": inner, "context": context, "limits": limits, "doors": []}
    return type("TlsProtocol", (_TlsDoor,), members)


class _TlsDoor(asyncio.Protocol):
    """One connection until its handshake is over."""

    inner: ClassVar[type[asyncio.Protocol]]
    context: ClassVar[ssl.SSLContext]
    limits: ClassVar[ConnectionLimits]
    doors: ClassVar[list["_TlsDoor"]]
    """Handshakes that go on, the oldest first."""

    def __init__(self, **options: object) -> None:
        self._protocol = self.inner(**options)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake; end the oldest one where there are too many."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a TCP socket
        transport.pause_reading()  # the handshake's bytes are not for this protocol
        self._transport = transport
        self.doors.append(self)
        self._task = self._loop.create_task(self._shake_hands(transport))
        if len(self.doors) > self.limits.handshakes:
            self.doors[0].close()

    def close(self) -> None:
        """End the handshake and the connection."""
        if self._task is not None:
            self._task.cancel()
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep what arrives with the handshake's last bytes."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the base's name
        """Forget a connection that was lost before its handshake."""
        self._is_lost = True
        self._leave()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            secured = await self._loop.start_tls(
                transport,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=self.limits.header_seconds,
            )
        except (OSError, ssl.SSLError):
            transport.abort()
        else:
            if secured is not None and not self._is_lost:
                self._hand_over(secured)
        finally:
            self._leave()

    def _hand_over(self, secured: asyncio.Transport) -> None:
        secured.set_protocol(self._protocol)
        self._protocol.connection_made(secured)
        for data in self._early:
            self._protocol.data_received(data)

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):
            self.doors.remove(self)


def _no_password() -> str:
    raise ValueError("the key has a password")
