"""A database that is locked, full, gone or another one: told apart, and taken up again."""

import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from sqlalchemy import URL

from moetune.domain.errors import SchemaMismatchError, StoreUnavailableError
from moetune.store import SqlStore, open_store
from tests.store.values import execute, make_plan


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder / "moetune.db"


@pytest.fixture
def pair(url: str) -> Iterator[tuple[SqlStore, SqlStore]]:
    """One store to write and one to read, as a planner has them, which soon lose patience."""
    with (
        open_store(url, patience_seconds=0.2) as store,
        open_store(url, read_only=True, patience_seconds=0.2) as reading,
    ):
        yield store, reading


def test_a_file_that_is_gone_is_not_made_and_taken_up_later(file: Path, tmp_path: Path) -> None:
    with open_store(str(file)) as store, open_store(str(file), read_only=True) as reading:
        store.save_plan(make_plan(1))
        with closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        away = tmp_path / "away.db"
        file.rename(away)
        for use in (lambda: store.save_plan(make_plan(2)), store.plans, reading.plans,
                    store.check_ready, reading.check_ready):  # fmt: skip
            with pytest.raises(StoreUnavailableError, match="cannot be opened"):
                use()
        assert not file.exists()
        away.rename(file)
        store.check_ready()
        reading.check_ready()
        store.save_plan(make_plan(3))
        assert [plan.tokens_per_rank for plan in reading.plans()] == [3, 1]


def test_a_file_that_is_put_in_its_place_is_taken_instead(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with open_store(str(other)) as store:
        store.save_plan(make_plan(7))
    with open_store(str(file)) as store, open_store(str(file), read_only=True) as reading:
        store.save_plan(make_plan(1))
        shutil.rmtree(file.parent)
        file.parent.mkdir()
        other.rename(file)
        assert [plan.tokens_per_rank for plan in reading.plans()] == [7]
        store.save_plan(make_plan(8))
    with open_store(str(file)) as store:
        assert [plan.tokens_per_rank for plan in store.plans()] == [8, 7]


def test_a_postgresql_table_that_others_hold_is_given_up_soon(socket_url: str) -> None:
    with (
        open_store(socket_url, patience_seconds=0.2) as store,
        psycopg.connect(socket_url.replace("+psycopg", "")) as other,
    ):
        other.execute("LOCK TABLE plans, moetune_revision IN ACCESS EXCLUSIVE MODE")
        for use in (lambda: store.save_plan(make_plan()), store.plans, store.check_ready):
            with pytest.raises(StoreUnavailableError, match="stayed locked"):
                use()
        other.rollback()
        store.check_ready()
        store.save_plan(make_plan())
        assert len(store.plans()) == 1


def test_many_threads_write_in_turn_and_none_is_locked_out(file: Path) -> None:
    errors: list[Exception] = []
    with open_store(str(file), patience_seconds=20) as store:

        def work(first: int) -> None:
            try:
                for tokens in range(first, first + 5):
                    store.save_plan(make_plan(tokens))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is one too many
                errors.append(error)

        threads = [threading.Thread(target=work, args=(1 + 5 * index,)) for index in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store.plans()) == 160


def test_a_full_disk_is_not_ready(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=0)
    with open_store(str(file)) as store:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
        with pytest.raises(StoreUnavailableError, match="disk is full"):
            store.check_ready()
        free.free = 2**30
        store.check_ready()


def test_another_schema_is_not_ready(pair: tuple[SqlStore, SqlStore], url: str) -> None:
    execute(url, "UPDATE moetune_revision SET version_num = '9999'")
    for store in pair:
        with pytest.raises(SchemaMismatchError, match="9999"):
            store.check_ready()


def test_a_database_without_tables_is_at_fault(pair: tuple[SqlStore, SqlStore], url: str) -> None:
    for table in ("settled", "plans", "moetune_revision"):
        execute(url, f"DROP TABLE {table}")
    for store in pair:
        with pytest.raises(StoreUnavailableError, match="other tables"):
            store.plans()
        with pytest.raises(StoreUnavailableError):
            store.check_ready()


def test_a_postgresql_that_takes_no_changes_is_not_ready(socket_url: str) -> None:
    open_store(socket_url).close()
    standby = f"{socket_url}&options=-c%20default_transaction_read_only%3Don"
    with open_store(standby) as store:
        with pytest.raises(StoreUnavailableError, match="read-only"):
            store.check_ready()
        with pytest.raises(StoreUnavailableError, match="read-only"):
            store.save_plan(make_plan())
        assert store.plans() == ()


class Wire:
    """A port that leads to the server, and can be cut and mended."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._sockets: list[socket.socket] = []
        self.port = 0
        self.mend()

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        for connection in (self._listener, *self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._server, timeout=10)
                far.settimeout(None)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def test_a_postgresql_that_is_gone_is_said_and_taken_up_when_it_is_back(network_url: URL) -> None:
    wire = Wire(("127.0.0.1", network_url.port or 0))
    url = network_url.set(port=wire.port).render_as_string(hide_password=False)
    try:
        with (
            open_store(url, patience_seconds=5) as store,
            open_store(url, read_only=True, patience_seconds=5) as reading,
        ):
            store.save_plan(make_plan(1))
            assert len(reading.plans()) == 1
            wire.cut()
            for use in (lambda: store.save_plan(make_plan(2)), reading.plans, store.check_ready,
                        reading.check_ready):  # fmt: skip
                with pytest.raises(StoreUnavailableError) as caught:
                    use()
                assert str(network_url.password) not in str(caught.value)
            wire.mend()
            store.check_ready()
            reading.check_ready()
            store.save_plan(make_plan(2))
            assert len(reading.plans()) == 2
    finally:
        wire.cut()
