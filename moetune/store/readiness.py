"""Whether a database that was opened can be read and written now."""

import shutil
from pathlib import Path

from sqlalchemy import Connection

from moetune.domain.errors import StoreUnavailableError
from moetune.store.database import Database
from moetune.store.migrate import check_head, no_database, read_state

LEAST_FREE_BYTES = 2**20


def check_ready(database: Database) -> None:
    """Read the schema, and take the write lock of a database open for writing; write nothing.

    How full the disk is can be seen of a SQLite file only: a full server says so when it is
    written to.

    Raises:
        StoreUnavailableError: it is locked, full or away.
        SchemaMismatchError: it has another schema.
    """
    state = database.read(read_state)
    if state.found is None:
        raise no_database(database.address)
    check_head(state, database.address)
    if database.read_only:
        return
    if not database.write(_can_write):
        raise StoreUnavailableError(
            f"database {database.address.shown} is read-only", "connect to the primary server"
        )
    if database.address.path is not None:
        _check_space(database.address.path)


def _can_write(connection: Connection) -> bool:
    """Return whether the transaction, which has begun, may write."""
    if connection.dialect.name == "sqlite":
        return True  # it has the write lock
    return connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "off"


def _check_space(file: Path) -> None:
    try:
        free_bytes = shutil.disk_usage(file.parent).free
    except OSError as error:
        raise StoreUnavailableError(
            f"the folder {file.parent} cannot be read: {error.strerror}", "is it mounted?"
        ) from None
    if free_bytes < LEAST_FREE_BYTES:
        raise StoreUnavailableError(
            f"database {file} cannot grow: its disk is full", "free some space"
        )
