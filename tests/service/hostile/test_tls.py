"""Garbage and long requests, against a real service that ends TLS itself."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.service.asking import Served, served
from tests.service.certificates import make_certificate

LONG = 240.0


@dataclass(frozen=True, kw_only=True)
class Secured:
    service: Served
    trust: ssl.SSLContext

    def connect(self) -> socket.socket:
        url = httpx.URL(self.service.url)
        connection = socket.create_connection((url.host, url.port or 443), timeout=LONG)
        connection.settimeout(LONG)
        return connection

    def is_well(self) -> bool:
        with httpx.Client(verify=self.trust, timeout=LONG) as http:
            return all(http.get(f"{self.service.url}/healthz").status_code == 200 for _ in range(2))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home: Path = tmp_path_factory.mktemp("tls")
    cert, key = make_certificate(home)
    token = home / "token"
    token.write_text("t" * 64)
    token.chmod(0o600)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--write-token-file", str(token))
    with served(home, *flags) as running:
        yield Secured(service=running, trust=ssl.create_default_context(cafile=str(cert)))


@pytest.mark.parametrize(
    "sent", [b"GET /healthz HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, b"\0" * 9]
)
def test_what_is_no_tls_is_closed(secured: Secured, sent: bytes) -> None:
    with contextlib.closing(secured.connect()) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):
                pass
    assert secured.is_well()


def test_limits_on_requests_hold_behind_tls(secured: Secured) -> None:
    wrapped = secured.trust.wrap_socket(secured.connect(), server_hostname="127.0.0.1")
    with contextlib.closing(wrapped) as connection:
        found = b""
        with contextlib.suppress(OSError):
            connection.sendall(
                b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 999_999
            )
        with contextlib.suppress(OSError):
            while part := connection.recv(4096):
                found += part
        assert found == b""
    assert secured.is_well()
