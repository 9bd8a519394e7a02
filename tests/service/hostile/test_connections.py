"""Silent, slow and endless connections to a real service with few file descriptors."""

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.service.asking import Served, served

LONG = 240.0
DESCRIPTORS = 256
HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = (
    b"POST /v1/whatif HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("connections")
    with served(home, descriptors=DESCRIPTORS) as running:
        yield running


def connect(service: Served) -> socket.socket:
    url = httpx.URL(service.url)
    connection = socket.create_connection((url.host, url.port or 80), timeout=LONG)
    connection.settimeout(LONG)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Everything until the service closes; a reset is its end, too."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            answer += part
    return answer


def send_until_closed(connection: socket.socket, piece: bytes, *, most: int) -> int:
    """Bytes that were taken before the service closed the connection."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
            time.sleep(0.001)
    return sent


def is_well(service: Served) -> bool:
    return httpx.get(f"{service.url}/healthz", timeout=LONG).status_code == 200


def test_more_silent_connections_than_descriptors_stop_nobody(service: Served) -> None:
    before = len(service.log.read_text().splitlines())
    silent = [connect(service) for _ in range(2 * DESCRIPTORS)]
    try:
        for _ in range(20):
            assert is_well(service)
    finally:
        for connection in silent:
            connection.close()
    assert is_well(service)
    assert len(service.log.read_text().splitlines()) - before < 60


@pytest.mark.parametrize(("start", "piece"), [
    (HEAD + b"X-Long: ", b"a" * 4096),
    (HEAD, b"X-Many: " + b"b" * 1000 + b"\r\n"),
    (b"GET /", b"c" * 4096),
    (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-T: " + b"d" * 999 + b"\r\n"),
    (CHUNKED, b"1;" + b"e" * 4000 + b"\r\n \r\n"),
], ids=["one header", "headers", "address", "trailers", "extensions of chunks"])  # fmt: skip
def test_what_never_ends_is_cut_off(service: Served, start: bytes, piece: bytes) -> None:
    with contextlib.closing(connect(service)) as connection:
        connection.sendall(start)
        # The sockets' own buffers take some of it, too.
        assert send_until_closed(connection, piece, most=2**26) < 2**24
    assert is_well(service)


def test_requests_that_arrive_too_slowly_are_ended(service: Served) -> None:
    with contextlib.ExitStack() as stack:
        started, silent = (stack.enter_context(contextlib.closing(connect(service))) for _ in "ab")
        started.sendall(HEAD)
        assert rest_of(started) == b""
        assert rest_of(silent) == b""
    assert is_well(service)


def test_a_flood_of_broken_requests_is_not_written_line_by_line(service: Served) -> None:
    before = len(service.log.read_text().splitlines())
    for _ in range(300):
        with contextlib.closing(connect(service)) as connection:
            connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert rest_of(connection).split()[1] == b"400"
    assert len(service.log.read_text().splitlines()) - before < 60
