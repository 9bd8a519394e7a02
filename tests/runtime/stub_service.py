"""A real HTTP server in a thread that answers, or fails to, as a test wants it."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moetune.domain.document import canonical_json
from moetune.domain.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Stub:
    """What a test sees of the server."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None
    is_over: threading.Event = field(default_factory=threading.Event)

    def documents(self, path: str) -> list[Any]:
        return [request.document for request in self.seen if request.path == path]


class Exchange(BaseHTTPRequestHandler):
    """One request, and ways to answer it well or badly."""

    stub: Stub
    answer: Callable[["Exchange", Seen], None]

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        seen = Seen(
            method=self.command, path=self.path, headers=dict(self.headers),
            body=self.rfile.read(length),
        )  # fmt: skip
        self.stub.seen.append(seen)
        type(self).answer(self, seen)

    do_POST = do_GET

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the base class's name
        pass

    def reply(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def problem(self, status: int, detail: str, hint: str = "") -> None:
        document = {"type": "about:blank", "status": status, "detail": detail, "hint": hint}
        self.reply(status, json.dumps(document).encode())

    def plan(self, plan: Plan) -> None:
        self.reply(200, canonical_json(plan).encode())

    def hang(self) -> None:
        """Never answer; end with the test."""
        self.stub.is_over.wait(60)

    def raw(self, data: bytes) -> None:
        self.wfile.write(data)

    def trickle(self) -> None:
        """Begin a good answer, and send a byte of it now and then."""
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not self.stub.is_over.wait(0.02):
            self.raw(b" ")


@contextmanager
def serving(answer: Callable[[Exchange, Seen], None]) -> Iterator[Stub]:
    """Serve on a free port of loopback; `stub.stop` is the service's death."""
    stub = Stub()

    class Handler(Exchange):
        pass

    Handler.stub, Handler.answer = stub, answer
    server = _Server(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    stub.stop = stop
    try:
        yield stub
    finally:
        stub.is_over.set()
        stop()
        thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Say nothing about clients that went away."""
