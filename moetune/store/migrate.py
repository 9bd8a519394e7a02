"""Schema revisions: a database's, the revision that this moetune wants, and upgrades.

Revisions are files `NNNN_name.py` without branches, so that opening a database reads the file
names alone and does not import Alembic.
"""

import logging
import os
import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, inspect, text

from moetune.domain.errors import BadStoreError, MoetuneError, SchemaMismatchError
from moetune.store.address import Address
from moetune.store.database import Database
from moetune.store.engine import Opening, connect_sqlite
from moetune.store.schema import VERSION_TABLE, metadata

_PACKAGE = Path(__file__).resolve().parent.parent
_ADVISORY_LOCK = 0x6D6F6574756E65  # "moetune" in ASCII
_LOGGER = logging.getLogger("moetune")


# Optuna keeps an `alembic_version`, and others may have tables in the same database. Batches
# because SQLite has almost no ALTER.
CONTEXT_OPTIONS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "version_table": VERSION_TABLE,
        "render_as_batch": True,
        "include_object": lambda _, name, kind, *_rest: kind != "table" or name in metadata.tables,
        "compare_type": True,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaState:
    """A database's revision, and the newest revision, which this moetune wants.

    Args:
        revision: None if there is no database yet.
    """

    revision: str | None
    head: str

    @property
    def up_to_date(self) -> bool:
        """Whether both revisions are the same."""
        return self.revision == self.head


def migrations_folder(package: Path = _PACKAGE) -> Path:
    """Return the folder of revisions in a package or a checkout; or raise MoetuneError."""
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise MoetuneError(f"the migrations are missing next to {package}", "install moetune again")


def known_revisions() -> tuple[str, ...]:
    """Return this moetune's revisions, oldest first."""
    files = (migrations_folder() / "versions").glob("[0-9]*_*.py")
    return tuple(sorted(file.name.partition("_")[0] for file in files))


def read_state(connection: Connection) -> SchemaState:
    """Return the present and the wanted revision; raise BadStoreError for a foreign database."""
    head = known_revisions()[-1]
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars()  # noqa: S608 - a constant
        if revision := ", ".join(sorted(map(str, rows))):  # a damaged page holds NULL
            return SchemaState(revision=revision, head=head)
    if clashes := sorted(tables & metadata.tables.keys()):
        raise BadStoreError(
            f"the database belongs to another program: it has another table {clashes[0]!r}",
            "name another database with --db",
        )
    return SchemaState(revision=None, head=head)


def no_database(address: Address) -> BadStoreError:
    """Return the error for a place that holds no database of moetune."""
    return BadStoreError(
        f"there is no moetune database at {address.shown}",
        "`moetune profile` makes it, or name another with --db",
    )


def require_head(database: Database) -> None:
    """Raise SchemaMismatchError for another revision, BadStoreError without a database."""
    state = database.read(read_state)
    if state.revision is None:
        raise no_database(database.address)
    if not state.up_to_date:
        raise mismatch(state, database.address)


def mismatch(state: SchemaState, address: Address) -> SchemaMismatchError:
    """Return the error for a database of another schema, with how to go on."""
    hint = "it was made by a newer moetune: install that version"
    if state.revision in known_revisions():
        hint = "run `moetune db upgrade` on it"
    what = f"has schema revision {state.revision}, this moetune wants {state.head}"
    return SchemaMismatchError(f"database {address.shown} {what}", hint)


def upgrade_to_head(address: Address, *, only_new: bool) -> SchemaState:
    """Bring a database to the head revision in one transaction.

    Processes that upgrade at the same time wait for each other, and only the first does the work.
    A SQLite file of an older schema is copied first, and the log names the copy.

    Args:
        only_new: leave a database that has a revision already as it is.

    Returns:
        The state before the upgrade.

    Raises:
        SchemaMismatchError: the database is newer than this moetune.
    """
    copies: list[Path] = []

    def work(connection: Connection) -> SchemaState:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL lock_timeout = '30s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        state = read_state(connection)
        if state.revision is None or not (only_new or state.up_to_date):
            if state.revision not in (None, *known_revisions()):
                raise mismatch(state, address)
            if address.path is not None and state.revision is not None:
                copies.append(_free_name(address.path, f"-before-{state.head}"))
                _copy(address.path, copies[0])
            _run_revisions(connection)
        return state

    with Database(address, Opening(enforce_foreign_keys=False)) as database:
        try:
            state = database.write(work)
        except BaseException:
            for copy in copies:
                copy.unlink(missing_ok=True)
            raise
    for copy in copies:
        words = f"{address.path} is upgraded to schema {state.head}; as it was before: {copy}"
        _LOGGER.warning(words)
    return state


def upgrade_private(database: Database) -> None:
    """Upgrade a file of an older schema unless others may write it; or SchemaMismatchError."""
    path = database.address.path
    if path is None or database.read(read_state).revision not in known_revisions()[:-1]:
        return
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    try:
        upgrade_to_head(database.address, only_new=False)
    except MoetuneError as error:
        what = f"database {path} has an older schema, and cannot be upgraded: {error.what}"
        raise SchemaMismatchError(what, error.hint) from error


def _free_name(path: Path, end: str) -> Path:
    while (path := path.with_stem(path.stem + end)).exists():
        end = "-again"
    return path


def _copy(path: Path, copy: Path) -> None:
    """Copy a file by a second connection: the writer's would wait for itself for ever."""
    try:
        with (
            closing(connect_sqlite(path, Opening(read_only=True))) as source,
            closing(connect_sqlite(copy, Opening())) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise MoetuneError(
            f"its copy {copy} cannot be written: {error}",
            "check the permissions of its folder, and free space",
        ) from None


def differences(connection: Connection) -> tuple[str, ...]:
    """Return how the database's tables differ from those in `schema`."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts=dict(CONTEXT_OPTIONS))
    return tuple(str(change) for change in compare_metadata(context, metadata))


def _run_revisions(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise MoetuneError(f"the migrations cannot be run: {error}", "install moetune again") from (
            error
        )
    broken = foreign_key_problems(connection)
    if broken:
        raise MoetuneError(
            f"the upgrade would break rows, and was undone: {broken[0]}",
            "run `moetune db check`, or restore a backup",
        )


def foreign_key_problems(connection: Connection) -> tuple[str, ...]:
    """Return the rows that refer to a missing row, which only SQLite lets exist."""
    if connection.dialect.name != "sqlite":
        return ()
    rows = connection.execute(text("PRAGMA foreign_key_check")).all()
    return tuple(f"row {row[1]} of {row[0]} refers to a missing row of {row[2]}" for row in rows)
