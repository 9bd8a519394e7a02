"""What `moetune db` does: upgrade, current and check. `backup` has its own module."""

from collections.abc import Callable
from contextlib import closing
from functools import partial

from sqlalchemy import Connection

from moetune.domain.errors import InputError
from moetune.store.address import Address, parse_address
from moetune.store.database import Database
from moetune.store.migrate import (
    SchemaState,
    differences,
    foreign_key_problems,
    known_revisions,
    no_database,
    read_state,
    upgrade_to_head,
)
from moetune.store.opening import check_place, set_journal
from moetune.store.sql_store import SqlStore


def upgrade(url: str) -> tuple[str | None, str]:
    """Bring a database to this moetune's schema, and make it where there is none.

    Returns:
        The revisions before and after; None before for a new database.

    Raises:
        SchemaMismatchError: the database is newer than this moetune.
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached or written; it is as it was before.
    """
    address = parse_address(url)
    check_place(address, must_exist=False)
    before = upgrade_to_head(address, only_new=False)
    with closing(Database.connect(address)) as database:
        set_journal(database)
    return before.found, before.head


def current(url: str) -> SchemaState:
    """Return the revision of a database beside the wanted one. Nothing is made or changed.

    Raises:
        InputError: the address, or the file at it, is no database.
        MoetuneError: the database cannot be reached or read.
    """
    address = parse_address(url)
    if address.path is not None and not address.path.exists():
        return SchemaState(found=None, head=known_revisions()[-1])
    with closing(_open_to_read(address)) as database:
        return database.read(read_state)


def check(url: str) -> tuple[str, ...]:
    """Return everything that is wrong with a database; empty for a sound one.

    Looks at the file's pages, the references between rows, the revision, the tables against
    this moetune's, and reads every document.

    Raises:
        InputError: there is no database, or the file cannot be read as one at all.
        MoetuneError: the database cannot be reached or read.
    """
    address = parse_address(url)
    with closing(_open_to_read(address)) as database:
        state = database.read(read_state)
        if state.found is None:
            raise no_database(address)
        if damage := database.read(_page_problems):
            return damage
        problems = database.read(foreign_key_problems)
        if not state.up_to_date:
            found = f"schema revision is {state.found}, this moetune wants {state.head}"
            return (*problems, f"{found}: run `moetune db upgrade`")
        different = tuple(f"the tables differ: {one}" for one in database.read(differences))
        return problems + (different or _document_problems(SqlStore(database)))


def _open_to_read(address: Address) -> Database:
    check_place(address, must_exist=True)
    return Database.connect(address, read_only=True)


def _page_problems(connection: Connection) -> tuple[str, ...]:
    if connection.dialect.name != "sqlite":
        return ()
    found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return tuple(str(one) for one in found if one != "ok")


def _document_problems(store: SqlStore) -> tuple[str, ...]:
    runs = store.runs()
    plans = store.plans()
    readings: tuple[Callable[[], object], ...] = (
        *(partial(store.samples, run.id) for run in runs),
        *(partial(store.profile, name) for name in sorted({run.name for run in runs})),
        *(partial(store.plan, plan.id) for plan in plans),
        *(partial(store.observations, plan.id) for plan in plans),
        *(partial(store.settled, plan.id) for plan in plans),
    )
    problems = []
    for reading in readings:
        try:
            reading()
        except InputError as error:
            problems.append(error.what)
    return tuple(problems)
