"""The store in SQLite or PostgreSQL: created where it is missing, refused where it is foreign."""

from sqlalchemy import Connection

from moetune.domain.errors import (
    BadStoreError,
    InputError,
    MoetuneError,
    StoreUnavailableError,
)
from moetune.store.address import Address, parse_address
from moetune.store.database import Database
from moetune.store.engine import Opening, journal_mode
from moetune.store.measurements import MeasurementStore
from moetune.store.migrate import check_head, no_database, read_state, upgrade_to_head
from moetune.store.plans import PlanStore
from moetune.store.removal import RemovalStore


class SqlStore(MeasurementStore, PlanStore, RemovalStore):
    """Storage of measurements and plans, made by `open_store`.

    Rows are appended, never averaged away. Safe for several processes and threads; every method
    commits before it returns. Lists that take `after` are pages, newest first: `after` is the id
    of the previous page's last entry, and rows appended meanwhile do not shift later pages.
    """


def open_store(
    url: str, *, read_only: bool = False, patience_seconds: float | None = None
) -> SqlStore:
    """Open the store at `url`; a new or empty database is given its tables first.

    A SQLite file that is removed later is not created again; a file that replaces it is used.

    Args:
        url: a file, `sqlite:///FILE`, or `postgresql+psycopg://USER@HOST/DATABASE`.
        read_only: open without any right to write; there must be a database then.
        patience_seconds: longest wait for locks of others; None as in `engine.Opening`.

    Raises:
        SchemaMismatchError: the database has an older or newer schema.
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached, read or written.
    """
    address = parse_address(url)
    check_place(address, must_exist=read_only)
    if address.path is not None and not address.path.exists():
        upgrade_to_head(address, only_new=True)
    how = Opening(read_only=read_only, create=False, patience_seconds=patience_seconds)
    database = Database.connect(address, how)
    try:
        _prepare(database, read_only=read_only)
    except BaseException:
        database.close()
        raise
    return SqlStore(database)


def _prepare(database: Database, *, read_only: bool) -> None:
    state = database.read(read_state)
    if state.found is None and not read_only:
        upgrade_to_head(database.address, only_new=True)
        state = database.read(read_state)
    if state.found is None:
        raise no_database(database.address)
    check_head(state, database.address)
    if not read_only:
        set_journal(database)


def check_place(address: Address, *, must_exist: bool) -> None:
    """Check that a database is or can be at the address; create a new SQLite file's folder.

    Raises:
        InputError: it is a folder or another file, lies in a file, or is absent and must exist.
        MoetuneError: the file may not be read, or the folder not be created.
    """
    path = address.path
    if path is None:
        return
    try:
        if path.is_dir():
            raise BadStoreError(f"{path} is a folder, not a database", f"name a file: {path}/it.db")
        if path.exists():
            # SQLite takes a single byte for an empty file. Only its size is looked at: to open
            # and close the file here would drop the locks of this process's other connections.
            if path.stat().st_size == 1:
                raise BadStoreError(f"{path} is no database", "name another file with --db")
        elif must_exist:
            raise no_database(address)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BadStoreError(
            f"{path.parent} is not a folder", "name another file with --db"
        ) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"database {path} cannot be opened or made: {error.strerror}",
            "check the permissions, or name another file with --db",
        ) from None


def set_journal(database: Database) -> None:
    """Set a SQLite file's journal: the write-ahead log, or on a network file system "delete".

    Raises:
        MoetuneError: a file on a network file system cannot have the "delete" journal.
    """
    path = database.address.path
    if path is None:
        return
    wanted = journal_mode(path)

    def work(connection: Connection) -> None:
        if connection.exec_driver_sql("PRAGMA journal_mode").scalar() != wanted:
            connection.exec_driver_sql(f"PRAGMA journal_mode = {wanted}")

    try:
        database.outside(work)
    except InputError:
        raise
    except MoetuneError:
        # "delete" is slower but as safe, so a reader that holds the file, or a read-only file, is
        # no reason to refuse it. A write-ahead log on a network file system is not safe.
        if wanted != "wal":
            raise
