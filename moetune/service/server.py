"""The server process of `moetune serve`: checks, socket, log, planner, uvicorn, graceful stop."""

import errno
import gc
import json
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import uvicorn

from moetune.config import Settings
from moetune.domain.errors import InputError, MoetuneError
from moetune.service.access import (
    DEFAULT_MAX_BODY_BYTES,
    Access,
    check_exposure,
    check_secret_file,
    names_of,
    read_token_file,
)
from moetune.service.app import create_app
from moetune.workflows.planner import open_planner

LogFormat = Literal["text", "json"]
LOGGERS = ("moetune", "uvicorn")


def start_logging(kind: LogFormat, *, level: int) -> None:
    """Configure the log of this process to go to stderr; `serve` calls it once."""
    # None of these is logged, and finding them takes a tenth of the time of a stored plan's answer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object per line; a record's `fields` are keys next to its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Time, level and message; a request's fields in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _fields(record)
        words = _request(fields) if fields else record.getMessage()
        line = f"{_time(record)} {record.levelname.lower():7} {words}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _request(fields: Mapping[str, object]) -> str:
    return "{method} {path} {status} {seconds} s {client} {request_id}".format_map(fields)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


_GRACE_SECONDS = 20
_BACKLOG = 2048
_SWITCH_INTERVAL_SECONDS = 0.0005
"""Longest wait of an answering thread for the GIL while another solves; Python's own is 5 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `moetune serve`.

    Args:
        port: 0 for a free one.
        allow_hosts: more accepted names in the Host header.
        tls_cert, tls_key: PEM files; both or none.
        level: of the log, as in `logging`.

    Raises:
        InputError: `max_body_bytes` is below 1.
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

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise InputError(f"max_body must be at least 1 byte, got {self.max_body_bytes}")


def serve(settings: Settings, options: ServerOptions, *, ready: Callable[[str, str], None]) -> None:
    """Serve until SIGTERM or SIGINT; open requests are answered before the end.

    Args:
        ready: called once, with the URL and the database, when requests are accepted.

    Raises:
        InputError: other machines could use the service without a token; a token or TLS file is
            wrong; the address is in use, or not one of this machine's.
        SchemaMismatchError: the database has another schema.
        MoetuneError: the database cannot be opened or made.
        KeyboardInterrupt: SIGINT, after the graceful stop.
    """
    access = access_of(options)
    check_tls(options)
    with closing(_listen(options)) as listener, open_planner(settings) as planner:
        url, location = _url(options, listener), planner.store.location
        app = create_app(planner, access)
        start_logging(options.log_format, level=options.level)
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        # Exempts what exists now from garbage collection: a full one stopped all answers for 80 ms.
        gc.freeze()
        server = _Server(
            uvicorn.Config(
                app,
                http="auto",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
            ),
            lambda: ready(url, location),
        )
        with _quiet_end():
            server.run(sockets=[listener])


def access_of(options: ServerOptions) -> Access:
    """Return the access rules, with the tokens of their files.

    Raises:
        InputError: a token file is wrong, both tokens are equal, or other machines could use the
            service without a token.
    """
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


def check_tls(options: ServerOptions) -> None:
    """Check certificate and key before anything is opened.

    Raises:
        InputError: one of them is missing, unreadable or does not match the other.
    """
    cert, key = options.tls_cert, options.tls_key
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise InputError("TLS needs a certificate and its key", "give --tls-cert and --tls-key")
    check_secret_file(key, "TLS key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _no_password)
    except (OSError, ValueError) as error:
        raise InputError(
            f"TLS certificate {cert} and key {key} cannot be used: {error}",
            "give PEM files of one certificate and its key, without a password",
        ) from None


class _Server(uvicorn.Server):
    """Uvicorn's server with a callback when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets=sockets)
        self._ready()


@contextmanager
def _quiet_end() -> Iterator[None]:
    """Ignore the SIGTERM that uvicorn raises again after its stop: the store is closed first."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listen(options: ServerOptions) -> socket.socket:
    """Return a listening socket.

    Raises:
        InputError: the port is in use or not permitted, or the host is not this machine's.
    """
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
        raise _no_listener(host, port, error) from None
    return listener


def _no_listener(host: str, port: int, error: OSError) -> MoetuneError:
    hint = "name another with --port, or 0 for a free one"
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host} is in use", f"{hint}; is moetune serving there?")
    if error.errno == errno.EACCES:
        return InputError(f"this user may not open port {port}", hint)
    return InputError(
        f"cannot listen on {host} port {port}: {error.strerror}",
        "give an address of this machine with --host: 127.0.0.1, or 0.0.0.0 for all of them",
    )


def _url(options: ServerOptions, listener: socket.socket) -> str:
    scheme = "http" if options.tls_cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _no_password() -> str:
    raise ValueError("the key has a password")
