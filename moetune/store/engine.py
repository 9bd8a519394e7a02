"""SQLAlchemy engines of SQLite and PostgreSQL that several processes can share.

SQLAlchemy's defaults for SQLite lose concurrent updates without an error (the driver does not BEGIN
before a SELECT). Deferred transactions fail as locked when they start to write. Hence: every
writing transaction takes the write lock as its first statement.

A process that has a SQLite file open can still write to it after it was removed or replaced, and
the rows are lost. Hence: a connection is given up as soon as its path holds another file.
"""

import json
import os
import re
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from moetune.domain.document import canonical_json
from moetune.domain.errors import BadStoreError, MoetuneError
from moetune.store.address import Address

BUSY_TIMEOUT_SECONDS = 30.0
_TURN_SECONDS = 20.0
# So many threads of a process can use a store at once; connections are made when they are needed.
NUM_CONNECTIONS = 16
# A connection to a server that vanished silently is given up after half a minute.
_POSTGRESQL_OPTIONS = MappingProxyType(
    {
        "application_name": "moetune",
        "connect_timeout": 10,
        "keepalives_idle": 30,
        "tcp_user_timeout": 30_000,
    }
)
_BEGIN_OPTION = "moetune_begin"
# SQLite's shared-memory index of the write-ahead log does not work across hosts.
_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\w*|9p|afs|ceph|glusterfs|lustre|gpfs|beegfs\w*|ocfs2|orangefs|pvfs2"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|rclone|gcsfuse|juicefs|moosefs|mfs|davfs)\S*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Options for opening a database.

    Args:
        create: create a SQLite file where there is none.
        enforce_foreign_keys: False for migrations, in which SQLite replaces tables: dropping
            the old one would delete the rows that refer to it.
        patience_seconds: longest wait for locks of other processes; None for half a minute with
            SQLite, and for no limit with PostgreSQL.
    """

    read_only: bool = False
    create: bool = True
    enforce_foreign_keys: bool = True
    patience_seconds: float | None = None

    @property
    def busy_seconds(self) -> float:
        """Longest wait for a connection, and with SQLite for a lock."""
        return BUSY_TIMEOUT_SECONDS if self.patience_seconds is None else self.patience_seconds

    @property
    def turn_seconds(self) -> float:
        """Longest wait for other threads of this process that write."""
        return _TURN_SECONDS if self.patience_seconds is None else self.patience_seconds / 2


def make_engine(address: Address, how: Opening) -> Engine:
    """Return an unconnected engine; raise MoetuneError without the driver of PostgreSQL."""
    how_to_connect = (
        {"connect_args": _postgresql_options(address.url, how)}
        if address.path is None
        else {"creator": partial(connect_sqlite, address.path, how)}
    )
    try:
        engine = create_engine(
            address.url,
            **how_to_connect,
            poolclass=QueuePool,
            pool_size=NUM_CONNECTIONS,
            max_overflow=0,
            pool_timeout=how.busy_seconds,
            json_serializer=canonical_json,
            json_deserializer=_read_json,
            hide_parameters=True,
        )
    except ImportError as error:
        raise MoetuneError(
            f"PostgreSQL needs the driver psycopg, which is not here: {error}",
            "run `pip install 'moetune[postgres]'`",
        ) from None
    if address.path is not None:
        _begin_explicitly(engine, "BEGIN" if how.read_only else "BEGIN IMMEDIATE")
        _watch_file(engine, address.path)
        return engine
    return engine.execution_options(postgresql_readonly=True) if how.read_only else engine


def reading(engine: Engine) -> Engine:
    """Return the engine for transactions that only read: they never wait for a writer."""
    return engine.execution_options(**{_BEGIN_OPTION: "BEGIN"})


def without_transaction(engine: Engine) -> Engine:
    """Return SQLite's engine for pragmas, which run only outside of a transaction."""
    return engine.execution_options(**{_BEGIN_OPTION: ""})


def journal_mode(path: Path) -> str:
    """Return the journal that suits the file system: "wal", or "delete" on a network."""
    mounts = Path("/proc/self/mounts")
    text = mounts.read_text(errors="replace") if mounts.exists() else ""
    kind = file_system(path, mounts=text)
    return "delete" if _NETWORK_FILE_SYSTEMS.fullmatch(kind) else "wal"


def file_system(path: Path, *, mounts: str) -> str:
    """Return the type of the file system that holds `path` in /proc/self/mounts, else ""."""
    real, best, kind = path.resolve(), 0, ""
    for line in mounts.splitlines():
        _, mount_point, mount_kind, *_ = line.split(" ")
        folder = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount_point))
        # The later of two mounts on one folder hides the earlier.
        if real.is_relative_to(folder) and len(folder.parts) >= best:
            best, kind = len(folder.parts), mount_kind
    return kind


_PRIVATE = 0o600
"""Mode of a new database: what a team measured is private."""


def connect_sqlite(path: Path, how: Opening) -> sqlite3.Connection:
    """Connect to a file; a file that this creates can be read by this user alone."""
    mode = "ro" if how.read_only else "rwc" if how.create else "rw"
    if mode == "rwc" and not path.exists():
        with suppress(OSError):  # SQLite says it better
            path.touch(mode=_PRIVATE)  # SQLite's files next to it get the same mode
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode={mode}",
        uri=True,
        timeout=how.busy_seconds,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute(f"PRAGMA foreign_keys = {int(how.enforce_foreign_keys)}")
    return connection


def _postgresql_options(url: URL, how: Opening) -> dict[str, Any]:
    """Return the connection's options that the address does not set itself."""
    options = {key: value for key, value in _POSTGRESQL_OPTIONS.items() if key not in url.query}
    if how.patience_seconds is not None:
        # PostgreSQL fails a statement that has waited this long for a lock.
        limit = f"-c lock_timeout={round(1000 * how.patience_seconds)}"
        options["options"] = f"{url.query.get('options', '')} {limit}"
    return options


def _begin_explicitly(engine: Engine, default: str) -> None:
    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        statement = connection.get_execution_options().get(_BEGIN_OPTION, default)
        if statement:
            connection.exec_driver_sql(statement)


def _watch_file(engine: Engine, path: Path) -> None:
    """Give up connections to a file that was removed or replaced since they were made."""

    def identity() -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @event.listens_for(engine, "connect")
    def note(_connection: object, entry: ConnectionPoolEntry) -> None:
        entry.info["file"] = identity()

    @event.listens_for(engine, "checkout")
    def compare(
        _connection: object, entry: ConnectionPoolEntry, _proxy: PoolProxiedConnection
    ) -> None:
        if entry.info["file"] != identity():
            raise DisconnectionError(f"{path} is another file now")


def _read_json(text: str | bytes) -> Any:  # noqa: ANN401 - plain values of any shape
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadStoreError(
            f"a row of the database holds no valid JSON: {error}",
            "the file was changed by another program: restore a backup",
        ) from None
