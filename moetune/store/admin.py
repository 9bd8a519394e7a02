"""Whole databases: open them, bring them to this moetune's schema, check them."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection

from moetune.domain.errors import BadStoreError, InputError, MoetuneError, StoreUnavailableError
from moetune.store import storable
from moetune.store.address import Address, parse_address
from moetune.store.database import Database
from moetune.store.engine import Opening, journal_mode
from moetune.store.measurements import MeasurementStore
from moetune.store.migrate import (
    SchemaState,
    differences,
    foreign_key_problems,
    known_revisions,
    mismatch,
    no_database,
    read_state,
    require_head,
    upgrade_private,
    upgrade_to_head,
)
from moetune.store.observed_runs import ObservedRunStore
from moetune.store.plans import PlanStore

_LEAST_FREE_BYTES = 2**20


class SqlStore(MeasurementStore, ObservedRunStore, PlanStore):
    """Storage of measurements and plans, made by `open_store`.

    Rows are appended, never averaged away. Safe for several processes and threads; every method
    commits before it returns. Lists that take `after` are pages, newest first. `after` is the id of
    the previous page's last entry, and rows appended meanwhile do not shift later pages.
    """

    def check_ready(self) -> None:
        """Read the schema, and take the write lock of a store open for writing; write nothing.

        Free space is checked for a SQLite file only: a server reports a full disk when it writes.

        Raises:
            StoreUnavailableError: it is locked, full or unreachable.
            SchemaMismatchError: it has another schema.
        """
        require_head(self)
        if self.how.read_only:
            return
        if not self.write(_can_write):
            raise StoreUnavailableError(
                f"database {self.location} is read-only", "connect to the primary server"
            )
        file = self.address.path
        if file is not None and shutil.disk_usage(file.parent).free < _LEAST_FREE_BYTES:
            raise StoreUnavailableError(
                f"database {file} cannot grow: its disk is full", "free some space"
            )


def open_store(
    url: str,
    *,
    read_only: bool = False,
    upgrades: bool = False,
    patience_seconds: float | None = None,
) -> SqlStore:
    """Open the store at `url`; a new or empty database is given its tables first.

    A SQLite file that is removed later is not created again; a file that replaces it is used.

    Args:
        url: a file, `sqlite:///FILE`, or `postgresql+psycopg://USER@HOST/DATABASE`.
        read_only: open without any right to write; the database must exist then.
        upgrades: first upgrade a file of an older schema, if only this user may write it.
        patience_seconds: longest wait for locks of other processes; see `engine.Opening`.

    Raises:
        SchemaMismatchError: the database has an older or newer schema.
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached, read or written.
    """
    address = parse_address(url)
    _check_place(address, must_exist=read_only)
    if address.path is not None and not address.path.exists():
        upgrade_to_head(address, only_new=True)
    how = Opening(read_only=read_only, create=False, patience_seconds=patience_seconds)
    store = SqlStore(address, how)
    try:
        if not read_only and store.read(read_state).revision is None:
            upgrade_to_head(address, only_new=True)
        if upgrades:
            upgrade_private(store)
        require_head(store)
        if not read_only:
            _set_journal(store)
    except BaseException:
        store.close()
        raise
    return store


def upgrade(url: str) -> tuple[str | None, str]:
    """Bring a database to this moetune's schema; create it where there is none.

    Returns:
        The revisions before and after; None before for a new database.

    Raises:
        SchemaMismatchError: the database is newer than this moetune.
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached or written; it is unchanged.
    """
    address = parse_address(url)
    _check_place(address, must_exist=False)
    before = upgrade_to_head(address, only_new=False)
    with Database(address) as database:
        _set_journal(database)
    return before.revision, before.head


def current(url: str) -> SchemaState:
    """Return a database's revision and the wanted revision; create and change nothing.

    Raises:
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached or read.
    """
    address = parse_address(url)
    if address.path is not None and not os.access(address.path, os.F_OK):
        return SchemaState(revision=None, head=known_revisions()[-1])
    with _open_to_read(address) as database:
        return database.read(read_state)


def check(url: str) -> tuple[str, ...]:
    """Return everything that is wrong with a database; empty for a sound database.

    Checks the file's pages, the references between rows, the revision and the tables against
    this moetune's, and reads every document.

    Raises:
        InputError: there is no database, or the file is not a database.
        MoetuneError: the database cannot be reached or read.
    """
    address = parse_address(url)
    with _open_to_read(address) as store:
        state = store.read(read_state)
        if state.revision is None:
            raise no_database(address)
        if damage := store.read(_page_problems):
            return damage
        problems = store.read(foreign_key_problems)
        if not state.up_to_date:
            error = mismatch(state, address)
            return (*problems, f"{error.what}: {error.hint}")
        different = tuple(
            f"the tables differ: {difference}" for difference in store.read(differences)
        )
        return problems + (different or tuple(_document_problems(store)))


def _open_to_read(address: Address) -> SqlStore:
    _check_place(address, must_exist=True)
    return SqlStore(address, Opening(read_only=True))


def _check_place(address: Address, *, must_exist: bool) -> None:
    """Check that a database is or can be at the address; create a new SQLite file's folder."""
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


def _set_journal(database: Database) -> None:
    """Set a SQLite file's journal: the write-ahead log, or on a network file system "delete"."""
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


def _can_write(connection: Connection) -> bool:
    """Return whether the transaction that has begun may write."""
    if connection.dialect.name == "sqlite":
        return True  # it has the write lock
    return connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "off"


def _page_problems(connection: Connection) -> tuple[str, ...]:
    if connection.dialect.name != "sqlite":
        return ()
    problems = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return tuple(str(problem) for problem in problems if problem != "ok")


def _document_problems(store: SqlStore) -> Iterator[str]:
    """Yield what is wrong with documents and rows; each line names the row."""
    runs = store.runs()
    for run in runs:
        what, remove = f"a sample of run {run.id}", f"profiles remove {run.name}"
        yield from _problems(partial(store.samples, run.id), what, remove)
    for name in sorted({run.name for run in runs}):
        what, remove = f"profile {name!r}", f"profiles remove {name}"
        yield from _problems(partial(store.profile, name), what, remove)
    for plan in store.plans():
        what, remove = f"plan {plan.id[:12]}", f"plans remove {plan.id[:12]}"
        yield from _problems(partial(store.plan, plan.id), what, remove)
        yield from _problems(partial(store.settled, plan.id), f"a settled size of {what}", remove)
    try:
        store.observed_runs()
    except InputError as error:
        yield f"{error.what}: `moetune observations remove` with its r and number removes it"


def _problems(read: Callable[[], Any], what: str, remove: str) -> Iterator[str]:
    """Yield why a row cannot be read, or which value no page can show, and the command `remove`."""
    try:
        values = read()
    except InputError as error:
        yield error.what
        return
    for value in values if isinstance(values, tuple) else (values,):
        try:
            if value is not None:
                storable.check(value)
        except InputError as error:
            yield f"{what}: {error.what}: `moetune {remove}` removes it"
