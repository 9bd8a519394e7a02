"""The server process of `moetune serve`: checks, socket, log, planner, uvicorn, graceful stop."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import uvicorn
from fastapi import FastAPI

from moetune.app.planner import open_planner
from moetune.app.solvers import SolverLimits, SolverPool
from moetune.config import Settings
from moetune.domain.errors import InputError
from moetune.service.access import (
    DEFAULT_MAX_BODY_BYTES,
    Access,
    check_exposure,
    names_of,
    read_token_file,
)
from moetune.service.app import create_app
from moetune.service.connections import LimitedProtocol

LogFormat = Literal["text", "json"]
LOGGERS = ("moetune", "uvicorn", "asyncio")
_REQUEST = "{method} {path} {status} {seconds} s {client} {request_id}"
_GRACE_SECONDS = 12
"""Time after SIGTERM in which open requests are answered; then solving stops."""
_LAST_SECONDS = 3
"""Time after that until their connections are closed."""
_BACKLOG = 2048
_LONGEST_DEADLINE_SECONDS = 600.0
_SWITCH_INTERVAL_SECONDS = 0.0005
"""Longest wait of an answering thread for the GIL while another solves. Python's default: 5 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `moetune serve`.

    Args:
        port: 0 for a free port.
        allow_hosts: more accepted names in the Host header.
        tls_cert, tls_key: PEM files; both or none.
        level: level of the log, as in `logging`.
        deadline_seconds: longest time to solve a question.

    Raises:
        InputError: `max_body_bytes` is below 1, or the deadline out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8642
    read_token_file: Path | None = None
    write_token_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_format: LogFormat = "text"
    level: int = logging.INFO
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    deadline_seconds: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.deadline_seconds <= _LONGEST_DEADLINE_SECONDS:
            raise InputError(
                f"deadline must be above 0 and at most 10 minutes, got {self.deadline_seconds:g} s"
            )
        if self.max_body_bytes < 1:
            raise InputError(f"max_body must be at least 1 byte, got {self.max_body_bytes}")


def serve(settings: Settings, options: ServerOptions, *, ready: Callable[[str, str], None]) -> None:
    """Serve until SIGTERM or SIGINT; open requests are answered before the end.

    Args:
        ready: called once, with the URL and the database, when requests are accepted.

    Raises:
        InputError: other machines could use the service without a token; a token or TLS file is
            wrong; the address is in use, or is not this machine's.
        MoetuneError: the database cannot be opened, upgraded or made.
        KeyboardInterrupt: SIGINT, after the graceful stop.
    """
    access = access_of(options)
    with (
        closing(_listen(options)) as listener,
        closing(SolverPool(SolverLimits(seconds=options.deadline_seconds))) as solver,
        open_planner(settings, solver=solver) as planner,
    ):
        url, location = _url(options, listener), planner.store.location
        config = _uvicorn(create_app(planner, access), options)
        start_logging(options.log_format, level=options.level)
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        # Exempts present objects from garbage collection, which stopped all answers for 80 ms.
        gc.freeze()
        server = _Server(config, lambda: ready(url, location), solver)
        with _quiet_end():
            server.run(sockets=[listener])


def access_of(options: ServerOptions) -> Access:
    """Return the access rules with the files' tokens; raise InputError if wrong or unsafe."""
    tokens = [
        None if file is None else read_token_file(file)
        for file in (options.read_token_file, options.write_token_file)
    ]
    if tokens[0] is not None and tokens[0] == tokens[1]:
        raise InputError(
            "the read token and the write token are the same", "give two, or only the write token"
        )
    names = (*names_of(options.host), *(name.lower() for name in options.allow_hosts))
    access = Access(
        read_token=tokens[0],
        write_token=tokens[1],
        hosts=tuple(dict.fromkeys(names)),
        max_body_bytes=options.max_body_bytes,
    )
    check_exposure(access, options.host)
    return access


def _uvicorn(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    """Return uvicorn's configuration; raise InputError if it cannot use the TLS files."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_SECONDS + _LAST_SECONDS,
    )
    try:
        config.load()
    except (AssertionError, OSError) as error:
        raise InputError(
            f"TLS cannot be served: {str(error) or 'there is no certificate'}",
            "give PEM files of one certificate and its key with --tls-cert and --tls-key",
        ) from None
    return config


class _Server(uvicorn.Server):
    """Uvicorn's server, which calls `ready` when it listens and ends solving when it stops."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], solver: SolverPool
    ) -> None:
        super().__init__(config)
        self._ready, self._solver = ready, solver

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then start the solving processes."""
        await super().startup(sockets=sockets)
        self._ready()
        threading.Thread(target=self._solver.start, daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer open requests; those still being solved after the grace time get an error."""
        late = asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._solver.close)
        await super().shutdown(sockets=sockets)
        late.cancel()


@contextmanager
def _quiet_end() -> Iterator[None]:
    """Ignore the SIGTERM that uvicorn raises again after its stop: the store is closed first."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listen(options: ServerOptions) -> socket.socket:
    """Return a listening socket; raise InputError if the address cannot be listened on."""
    host, port = options.host, options.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"host {host!r} has no address ({error})") from None
    # The protocol is named because asyncio sets TCP_NODELAY only then; else answers take 40 ms.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            "name another --port, or 0 for a free port; --host is an address of this machine, or "
            "0.0.0.0 for all of them",
        ) from None
    return listener


def _url(options: ServerOptions, listener: socket.socket) -> str:
    scheme = "http" if options.tls_cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def start_logging(kind: LogFormat, *, level: int) -> None:
    """Configure the log of this process to go to stderr; `serve` calls it once."""
    # None of these is logged, and finding them takes a tenth of the time of a stored plan's answer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(OncePerSecond())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(kind))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class OncePerSecond(logging.Filter):
    """A filter that passes a text once a second: failed accepts, broken requests come in floods."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the text has not been logged for a second."""
        text = str(record.msg)
        is_new = record.created - self._last.get(text, 0.0) >= 1.0
        if is_new:
            self._last[text] = record.created
        return is_new


class Lines(logging.Formatter):
    """A formatter that writes a line per record: a JSON object, or time, level and words.

    A record's `fields` are keys next to its message in JSON, and replace its message in words.
    """

    def __init__(self, kind: LogFormat) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: Mapping[str, object] = getattr(record, "fields", {})
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        time, level = moment.replace("+00:00", "Z"), record.levelname.lower()
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._kind == "json":
            names = {"time": time, "level": level, "logger": record.name}
            more = {"traceback": traceback} if traceback else {}
            return json.dumps({**names, "message": record.getMessage(), **fields, **more})
        words = _REQUEST.format_map(fields) if fields else record.getMessage()
        return f"{time} {level:7} {words}" + (f"\n{traceback}" if traceback else "")
