"""Bad addresses, broken files, locks and lost servers: one clear error each, nothing lost."""

import os
import pickle
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from moetune.domain.errors import InputError, MoetuneError
from moetune.store import check, current, engine, open_store, upgrade
from tests.store.values import CLUSTER, MEASURED, execute, make_plan, make_profile

pytestmark = pytest.mark.unmeasured

Maker = Callable[[], object]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with some pages of rows, and nothing beside it."""
    path = tmp_path / "moetune.db"
    with open_store(str(path)) as store:
        for _ in range(20):
            store.save_profile(make_profile(samples=MEASURED))
    return path


def every_use(url: str) -> tuple[Maker, ...]:
    return (
        lambda: open_store(url).close(), lambda: open_store(url, read_only=True).close(),
        lambda: current(url), lambda: check(url), lambda: upgrade(url),
    )  # fmt: skip


@pytest.mark.parametrize(("address", "part"), [
    ("", "is no database"),
    ("  ", "is no database"),
    ("a\0b", "is no database"),
    ("mysql://user:secret@host/db", "'mysql' are not supported"),
    ("postgresql+psycopg2://user:secret@host/db", "'postgresql+psycopg2' are not supported"),
    ("postgresql+psycopg://user:secret@host:port/db", "no database URL"),
    ("postgresql:user:secret@host/db", "no database URL"),
    ("nonsense://user:secret@", "not supported"),
    ("://user:secret@host", "no database URL"),
    ("sqlite:moetune.db", "no database URL"),
    ("sqlite://moetune.db", "lacks a slash"),
    ("sqlite://", "in memory"),
    ("sqlite:///:memory:", "in memory"),
    ("sqlite:///moetune.db?mode=ro", "takes no options"),
    ("~nobody-of-this-name/moetune.db", "unknown home directory"),
])  # fmt: skip
def test_what_is_no_address_is_refused_without_its_password(address: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        open_store(address)
    assert part in str(caught.value)
    assert "postgresql+psycopg://USER@HOST/DATABASE" in caught.value.hint or "slash" in part
    assert "secret" not in str(caught.value)


def test_a_file_is_named_by_path_or_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    odd = "folder with spaces/100%20 ?#ü.db"
    for address, path in (
        ("plain.db", "plain.db"), ("sqlite:///plain.db", "plain.db"),
        (f"sqlite:///{tmp_path}/deep/er.db", "deep/er.db"), ("~/home.db", "home.db"), (odd, odd),
    ):  # fmt: skip
        with open_store(address) as store:
            assert store.location == str(tmp_path / path)
        assert (tmp_path / path).read_bytes().startswith(b"SQLite format 3\0")


_NO_DATABASES = (
    b"x", b"name = 'profile'\n" * 99, b"SQLite format 3\0" + b"\xff" * 4080, b"\0" * 4096,
)  # fmt: skip
_CUTS = (1, 99, 100, 512, 4095, 4096, 4097, 20_000, -4096)


@pytest.mark.parametrize("damage", [*_NO_DATABASES, *_CUTS])
def test_a_file_that_is_no_whole_database_is_bad_input_and_stays_as_it_is(
    file: Path, tmp_path: Path, damage: bytes | int
) -> None:
    whole = file.read_bytes()
    assert len(whole) > 40_000
    content = damage if isinstance(damage, bytes) else whole[:damage]
    file.write_bytes(content)
    for use in every_use(str(file)):
        with pytest.raises(InputError, match=r"is (damaged|no database)") as caught:
            use()
        assert str(file) in caught.value.what
        assert caught.value.hint
    assert file.read_bytes() == content
    assert not (tmp_path / "copy").exists()


def test_an_empty_or_absent_file_is_a_new_database_but_not_for_reading(tmp_path: Path) -> None:
    empty, absent = tmp_path / "empty.db", tmp_path / "folder" / "absent.db"
    empty.touch()
    for path in (empty, absent):
        uses = every_use(str(path))
        assert current(str(path)).revision is None
        for use in (uses[1], uses[3]):
            with pytest.raises(InputError, match="no moetune database"):
                use()
    assert list(tmp_path.iterdir()) == [empty]
    assert empty.stat().st_size == 0
    open_store(str(empty)).close()
    assert check(str(empty)) == ()


def test_a_folder_or_a_path_through_a_file_is_bad_input(file: Path, tmp_path: Path) -> None:
    for use in every_use(str(tmp_path)):
        with pytest.raises(InputError, match="is a folder"):
            use()
    for path in (file / "deeper.db", file / "deeper" / "still.db"):
        with pytest.raises(InputError, match="is not a folder"):
            open_store(str(path))


def test_a_name_that_no_file_can_have_is_said(tmp_path: Path) -> None:
    with pytest.raises(MoetuneError, match="File name too long"):
        open_store(str(tmp_path / ("x" * 300)))


def _failure_of_nobody(work: Maker) -> str:
    """Return the error of `work` in a forked process of a user without rights."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
            os.write(writing, b"no error")
        except MoetuneError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


def test_what_may_not_be_read_or_written_is_said(open_folder: Path) -> None:
    path = open_folder / "moetune.db"
    open_store(str(path)).close()
    url = str(path)

    def write() -> None:
        with open_store(url) as store:
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")

    path.chmod(0o444)
    assert "read-only" in _failure_of_nobody(write)
    os.chown(path, 65534, -1)
    set_schema = "UPDATE moetune_revision SET version_num = '{}'".format
    execute(url, set_schema("0010"))
    assert "cannot be upgraded" in _failure_of_nobody(lambda: open_store(url, upgrades=True))
    execute(url, set_schema(current(url).head))
    path.chmod(0o000)
    assert "cannot be opened" in _failure_of_nobody(write)
    open_folder.chmod(0o555)
    new = str(open_folder / "new.db")
    assert "cannot be opened" in _failure_of_nobody(lambda: open_store(new))
    open_folder.chmod(0o000)
    assert "cannot be opened" in _failure_of_nobody(lambda: open_store(url))
    open_folder.chmod(0o555)
    deeper = str(open_folder / "deeper" / "new.db")
    assert "cannot be opened or made" in _failure_of_nobody(lambda: open_store(deeper))
    with open_store(url) as store:
        assert store.runs() == ()


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_only_our_errors_come_of_changed_bytes(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=300))
    broken = file.with_name("broken.db")
    for rest in ("", "-wal", "-shm"):
        broken.with_name(broken.name + rest).unlink(missing_ok=True)
    broken.write_bytes((whole[:start] + junk + whole[start + len(junk) :])[: len(whole)])

    def read_everything() -> None:
        with open_store(str(broken)) as store:
            for run in store.runs():
                store.samples(run.id)
            store.profile("h200-x8")
            store.save_plan(make_plan())
            store.plans()

    for use in (read_everything, lambda: check(str(broken)), lambda: current(str(broken))):
        with suppress(MoetuneError):
            use()


def test_a_row_that_another_program_changed_is_named(file: Path) -> None:
    for statement, part in (
        ("UPDATE fits SET document = '{}'", "profile 'h200-x8': profile lacks the key 'schema'"),
        ('UPDATE samples SET point = \'{"kind": "copy"}\'', "sample 1.point lacks the key"),
        ("UPDATE samples SET point = '{'", "no valid JSON"),
    ):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(statement)
            connection.commit()
        assert any(part in problem for problem in check(str(file)))
        with open_store(str(file)) as store, pytest.raises(InputError):
            store.profile("h200-x8")


def test_a_full_database_says_so_and_keeps_the_rows_whole(file: Path) -> None:
    store = open_store(str(file))
    run_id = store.start_run(name="full", cluster=CLUSTER, preset="quick")

    @event.listens_for(store.engine, "begin")
    def limit(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # what is there, not a page more

    with pytest.raises(MoetuneError, match="the disk is full; nothing was written"):
        store.add_samples(run_id, MEASURED * 500)
    assert store.samples(run_id) == ()
    store.close()
    assert check(str(file)) == ()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_SECONDS", 0.4)


@pytest.mark.usefixtures("impatient")
def test_a_file_that_stays_locked_is_given_up_with_a_clear_error(file: Path) -> None:
    with open_store(str(file)) as store, closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MoetuneError, match="stayed locked by another process") as caught:
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")
        assert caught.value.exit_code == 1
        assert len(store.runs()) == 20  # reading goes on
        other.rollback()
        assert store.start_run(name="h200", cluster=CLUSTER, preset="quick") == 21


@pytest.mark.usefixtures("impatient")
def test_a_reader_that_keeps_the_old_journal_in_place_does_not_keep_others_out(file: Path) -> None:
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("PRAGMA journal_mode = delete").fetchone() == ("delete",)
        other.execute("BEGIN")
        other.execute("SELECT * FROM runs").fetchall()
        with open_store(str(file)) as store:
            assert len(store.runs()) == 20
        other.rollback()
        with open_store(str(file)) as store:
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")
    with closing(sqlite3.connect(file)) as later:
        assert later.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_goes_away_is_waited_for(file: Path) -> None:
    other = sqlite3.connect(file, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    releaser = threading.Timer(0.2, other.rollback)
    with open_store(str(file)) as store:
        releaser.start()
        assert store.start_run(name="h200", cluster=CLUSTER, preset="quick") == 21
    releaser.join()
    other.close()


def test_errors_survive_pickling_between_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_store(str(tmp_path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own bytes
