"""Whether a database that was opened can be read and written now."""

import shutil

from moetune.domain.errors import StoreUnavailableError
from moetune.store.database import Database
from moetune.store.migrate import check_head, no_database, read_state

LEAST_FREE_BYTES = 2**20


def check_ready(database: Database) -> None:
    """Read the schema and take the write lock, but write nothing.

    How full the disk is can be seen of a SQLite file only: a full server says so when it is
    written to.

    Raises:
        StoreUnavailableError: it is locked, full or away.
        SchemaMismatchError: it has another schema.
    """
    address = database.address
    state = database.read(read_state)
    if state.found is None:
        raise no_database(address)
    check_head(state, address)
    database.write(lambda _: None)
    if address.path is None:
        return
    try:
        free_bytes = shutil.disk_usage(address.path.parent).free
    except OSError as error:
        raise StoreUnavailableError(
            f"the folder {address.path.parent} cannot be read: {error.strerror}", "is it mounted?"
        ) from None
    if free_bytes < LEAST_FREE_BYTES:
        raise StoreUnavailableError(
            f"database {address.shown} cannot grow: its disk is full", "free some space"
        )
