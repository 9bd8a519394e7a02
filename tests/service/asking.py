"""Ask an application in this process, and a real `moetune serve` in another."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp

from tests.documents import check_document

ROOT = Path(__file__).resolve().parents[2]
BASE_URL = "http://127.0.0.1:8642"
TIMEOUT_SECONDS = 120.0
READ, WRITE = "read-token-0123456789", "write-token-0123456789"
"""Tokens of a guarded service."""
SMALL = {"model": "gpt-s", "profile": "rtx2080ti-x64"}
"""A question that takes the solver a second."""
READY = re.compile(r"moetune serves (https?://\S+) \(database (.+)\)")


Ask = Callable[[httpx.AsyncClient], Any]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Sends requests to an application; all of them meet in one event loop."""

    portal: BlockingPortal
    http: httpx.AsyncClient

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            self.http.cookies.clear()  # a test that wants a cookie sends it
            return await self.http.request(method, path, **more)

        answer: httpx.Response = self.portal.call(send)
        if "json" in answer.headers.get("content-type", "") and answer.content:
            check_document(answer.json())
        return answer

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: object = None, **more: Any) -> httpx.Response:
        return self.ask("POST", path, **({} if body is None else {"json": body}), **more)

    def together(self, paths: Sequence[tuple[str, object]]) -> list[httpx.Response]:
        """Post all bodies at the same time."""

        async def send() -> list[httpx.Response]:
            posts = (self.http.post(path, json=body) for path, body in paths)
            return list(await asyncio.gather(*posts))

        answers: list[httpx.Response] = self.portal.call(send)
        return answers


@contextmanager
def client_of(app: ASGIApp, **headers: str) -> Iterator[Client]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url=BASE_URL, headers=headers)
    with start_blocking_portal() as portal:
        yield Client(portal=portal, http=http)
        portal.call(http.aclose)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `moetune serve`."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=TIMEOUT_SECONDS)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log, of a service that writes it as JSON."""
        text = self.log.read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moetune", *arguments]


@contextmanager
def served(
    home: Path, *arguments: str, db: Path | None = None, descriptors: int | None = None
) -> Iterator[Served]:
    """Run the service on a free port until the block ends, with so many file descriptors."""
    limited = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh") if descriptors else ()
    log = home / f"serve-{os.urandom(4).hex()}.log"
    chosen = ("--db", str(db)) if db else ()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*limited, *command(*chosen, "serve", "--port", "0", *arguments)],
            env=environment(home), cwd=home, stdout=subprocess.DEVNULL, stderr=output, text=True,
        )  # fmt: skip
    try:
        yield Served(url=_wait_until_ready(process, log), process=process, log=log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[str], log: Path) -> str:
    for _ in range(int(TIMEOUT_SECONDS / 0.05)):
        match = READY.search(log.read_text())
        if match:
            return match[1]
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"moetune serve is not ready:\n{log.read_text()}")
