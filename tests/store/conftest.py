"""Databases for the store's tests: SQLite files, and a PostgreSQL server of their own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL

from moetune.store import SqlStore, open_store
from tests.ports import free_port

PASSWORD = "correct horse:battery\\staple"  # noqa: S105 - of a server that lives for a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running PostgreSQL: its socket's folder trusts everybody, its port asks a password."""

    folder: Path
    port: int

    def empty(self, database: str) -> str:
        """Empty the database: much less to write than a new one for each test."""
        with psycopg.connect(self.conninfo(database), autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
            connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
        return database

    def conninfo(self, database: str) -> str:
        return f"host={self.folder} port={self.port} user=moetune dbname={database}"

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://moetune@/{database}?host={self.folder}&port={self.port}"


def _programs() -> Path | None:
    initdb = shutil.which("initdb")
    folders = [Path(initdb).resolve().parent] if initdb else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def _as_ordinary_user(folder: Path) -> list[str]:
    """Give the folder to an account without rights, and return the command's prefix."""
    if os.getuid() != 0:
        return []
    accounts = {account.pw_name: account for account in pwd.getpwall()}
    account = accounts.get("postgres") or accounts["nobody"]
    os.chown(folder, account.pw_uid, account.pw_gid)
    ids = (f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups")
    return ["setpriv", *ids, "--pdeathsig=INT", "--"]


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            psycopg.connect(server.conninfo("postgres")).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{log.read_text()}")
            time.sleep(0.05)
        else:
            return


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    programs = _programs()
    if programs is None:
        reason = "PostgreSQL is not installed: run tests/install_postgresql.sh as root"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="moetune-pg-"))
    prefix = _as_ordinary_user(folder)
    password_file, log = folder / "password", folder / "log"
    password_file.write_text(PASSWORD)
    password_file.chmod(0o644)
    subprocess.run(
        [*prefix, programs / "initdb", "--no-sync", "--encoding=UTF8", "--username=moetune",
         "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password_file}",
         folder / "data"],
        check=True, capture_output=True, cwd=folder, timeout=60,
    )  # fmt: skip
    made = Server(folder=folder, port=free_port())
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, programs / "postgres", "-D", folder / "data", "-k", folder,
             "-p", str(made.port), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
            stdout=output, stderr=output, cwd=folder,
        )  # fmt: skip
    try:
        _wait_until_ready(made, process, log)
        with psycopg.connect(made.conninfo("postgres"), autocommit=True) as connection:
            connection.execute("CREATE DATABASE one")
            connection.execute("CREATE DATABASE two")
        yield made
    finally:
        process.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def socket_url(server: Server) -> str:
    """An empty PostgreSQL database by the way that needs no password."""
    return server.url(server.empty("one"))


@pytest.fixture
def network_url(server: Server) -> URL:
    """An empty PostgreSQL database by the way that needs one."""
    return URL.create("postgresql+psycopg", username="moetune", password=PASSWORD, host="127.0.0.1",
                      port=server.port, database=server.empty("two"))  # fmt: skip


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An absent or empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/moetune.db"
    return str(request.getfixturevalue("socket_url"))


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    with open_store(url) as opened:
        yield opened
