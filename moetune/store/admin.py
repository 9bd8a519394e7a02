"""Administration of a database: upgrade, current revision, check, backup."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from operator import attrgetter
from pathlib import Path

from sqlalchemy import Connection

from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.storable import check_observation, check_plan, check_profile, check_settled
from moetune.store.address import Address, parse_address
from moetune.store.database import Database
from moetune.store.engine import Opening
from moetune.store.migrate import (
    SchemaState,
    differences,
    foreign_key_problems,
    known_revisions,
    no_database,
    read_state,
    upgrade_to_head,
)
from moetune.store.sql_store import SqlStore, check_place, set_journal

_PAGE_SIZE = 1000


def upgrade(url: str) -> tuple[str | None, str]:
    """Bring a database to this moetune's schema; create it where there is none.

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
    """Return the revision of a database and the wanted one; nothing is created or changed.

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

    Checks the file's pages, the references between rows, the revision and the tables against
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
        return problems + (different or tuple(_document_problems(SqlStore(database))))


def _open_to_read(address: Address) -> Database:
    check_place(address, must_exist=True)
    return Database.connect(address, Opening(read_only=True))


def _page_problems(connection: Connection) -> tuple[str, ...]:
    if connection.dialect.name != "sqlite":
        return ()
    found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return tuple(str(one) for one in found if one != "ok")


def _document_problems(store: SqlStore) -> Iterator[str]:
    """Yield what is wrong with documents and rows; each line names the row."""
    runs = store.runs()
    for run in runs:
        yield from _problems(partial(store.samples, run.id))
    for name in sorted({run.name for run in runs}):
        of_name = f"profile {name!r}", f"profiles remove {name}"
        yield from _problems(partial(store.profile, name), check_profile, *of_name)
    for plan in store.plans():
        short = plan.id[:12]
        remove = f"plans remove {short}"
        yield from _problems(partial(store.plan, plan.id), check_plan, f"plan {short}", remove)
        sizes = f"a settled size of plan {short}"
        yield from _problems(partial(store.settled, plan.id), check_settled, sizes, remove)
    after = 0
    while True:  # there may be millions of them
        try:
            page = store.observation_page(None, after=after, limit=_PAGE_SIZE)
        except InputError as error:
            yield error.what
            return
        for row in page:
            of_row = f"observation {row.id}", f"observations remove {row.id}"
            yield from _problems(partial(attrgetter("value"), row), check_observation, *of_row)
        if len(page) < _PAGE_SIZE:
            return
        after = page[-1].id


def _problems(
    read: Callable[[], object],
    check_value: Callable[..., None] = lambda _: None,
    what: str = "",
    remove: str = "",
) -> Iterator[str]:
    """Yield why a row cannot be read, or which of its values no page can show.

    Args:
        remove: the command that removes the row.
    """
    try:
        found = read()
    except InputError as error:
        yield error.what
        return
    for value in found if isinstance(found, tuple) else (found,):
        try:
            if value is not None:
                check_value(value)
        except InputError as error:
            yield f"{what}: {error.what}: `moetune {remove}` removes it"


def backup(url: str, target: Path) -> Path:
    """Copy a SQLite database, as of one moment, to a new single file without a journal.

    Returns:
        The file's absolute path.

    Raises:
        InputError: there is no database, it is damaged or PostgreSQL's, whose own `pg_dump` makes
            its backups, or the target exists or has no folder.
        MoetuneError: the database cannot be read, or the disk is full. There is no target then.
    """
    address = parse_address(url)
    if address.path is None:
        raise InputError(
            f"database {address.shown} is PostgreSQL's, which has backups of its own",
            "make one:  pg_dump --format custom DATABASE > FILE",
        )
    target = target.absolute()
    with closing(_open_to_read(address)) as database:
        if target.exists():
            raise InputError(f"{target} exists already", "name a new file: no backup is replaced")
        if not target.parent.is_dir():
            raise InputError(f"there is no folder {target.parent}", "make it, or name another file")
        if database.read(read_state).found is None:
            raise no_database(address)
        try:
            _copy(database, target)
        except OSError as error:
            raise MoetuneError(f"backup {target} failed: {error}", "name another folder") from error
    return target


def _copy(database: Database, target: Path) -> None:
    """Write the rows to a temporary folder next to the target; sync and rename when it is done."""

    def work(connection: Connection) -> tuple[str, ...]:
        connection.exec_driver_sql("VACUUM INTO ?", (str(temporary),))
        return _page_problems(connection)

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".moetune-backup-") as folder:
        temporary = Path(folder) / target.name
        if problems := database.outside(work):
            raise InputError(
                f"database {database.address.shown} is damaged: {problems[0]}",
                "keep the older backups",
            )
        temporary.chmod(0o600)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
