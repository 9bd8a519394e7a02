"""Administration of a database: upgrade, current revision, check, backup."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Connection

from moetune.domain.errors import InputError, MoetuneError
from moetune.store.address import Address, parse_address
from moetune.store.checks import document_problems
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
from moetune.store.sql_store import SqlStore, check_place, set_journal


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
        return problems + (different or document_problems(SqlStore(database)))


def _open_to_read(address: Address) -> Database:
    check_place(address, must_exist=True)
    return Database.connect(address, read_only=True)


def _page_problems(connection: Connection) -> tuple[str, ...]:
    if connection.dialect.name != "sqlite":
        return ()
    found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return tuple(str(one) for one in found if one != "ok")


def backup(url: str, target: Path) -> Path:
    """Copy the database to a new file: of SQLite a database, of PostgreSQL a `pg_dump` archive.

    Returns:
        The file's absolute path.

    Raises:
        InputError: there is no database, or the target exists or has no folder.
        MoetuneError: the database cannot be read, the disk is full, or `pg_dump` is missing or
            failed. There is no target then.
    """
    address = parse_address(url)
    check_place(address, must_exist=True)
    target = target.absolute()
    if target.exists():
        raise InputError(f"{target} exists already", "name a new file: backups are not replaced")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent}", "make it, or name another file")
    database = Database.connect(address, read_only=True)
    try:
        if database.read(read_state).found is None:
            raise no_database(address)
        with _whole_or_nothing(target) as temporary:
            if address.path is None:
                _dump_postgresql(database, temporary)
            else:
                _copy_sqlite(database, temporary)
    except OSError as error:
        raise MoetuneError(f"backup {target} failed: {error}", "name another folder") from error
    finally:
        database.close()
    return target


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """Yield a file in a temporary folder next to the target; sync and rename it when it is done."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".moetune-backup-") as folder:
        temporary = Path(folder) / target.name
        yield temporary
        temporary.chmod(0o600)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)


def _copy_sqlite(database: Database, target: Path) -> None:
    """Write the rows as of one moment to a single file, without a journal next to it."""

    def work(connection: Connection) -> tuple[str, ...]:
        connection.exec_driver_sql("VACUUM INTO ?", (str(target),))
        return _page_problems(connection)

    if problems := database.outside(work):
        raise InputError(
            f"database {database.address.shown} is damaged: {problems[0]}", "keep the older backups"
        )


def _dump_postgresql(database: Database, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise MoetuneError(
            "pg_dump is not installed: it makes the backup of PostgreSQL",
            "install postgresql-client of the server's version",
        )
    passwords = target.with_name("passwords")
    command = [program, "--format=custom", f"--file={target}", "--no-password"]
    connection = _connection_text(database, passwords)
    done = subprocess.run(  # noqa: S603 - a list of arguments, no shell
        [*command, f"--dbname={connection}"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise MoetuneError(
            f"pg_dump of {database.address.shown} failed: "
            f"{database.address.scrub(' '.join(done.stderr.split()))}",
            "check the server, and that pg_dump is as new as it",
        )


def _connection_text(database: Database, passwords: Path) -> str:
    """Return libpq's connection text; a password goes into a file: others can read arguments."""
    from psycopg.conninfo import make_conninfo

    _, options = database.engine.dialect.create_connect_args(database.address.url)
    options.pop("context", None)  # psycopg's own, not libpq's
    if password := options.pop("password", None):
        escaped = str(password).replace("\\", r"\\").replace(":", r"\:")
        passwords.touch(mode=0o600)
        passwords.write_text(f"*:*:*:*:{escaped}\n")
        options["passfile"] = str(passwords)
    return make_conninfo("", **options)
