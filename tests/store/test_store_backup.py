"""Backups while others write, whole or not at all; and the journal that suits a file system."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from moetune.domain.samples import Sample
from moetune.store import check, engine, open_store, upgrade
from moetune.store.engine import file_system
from tests.store.values import CLUSTER, MEASURED

BATCH = 5


@contextmanager
def writing(url: str, run_id: int, batch: tuple[Sample, ...]) -> Iterator[None]:
    """Append batches without a pause in another thread with a store of its own."""
    stop = threading.Event()
    started = threading.Event()

    def work() -> None:
        with open_store(url) as store:
            while not stop.is_set():
                store.add_samples(run_id, batch)
                started.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(30)
        yield
    finally:
        stop.set()
        thread.join()


def test_a_backup_taken_while_others_write_is_whole(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/moetune.db"
    with open_store(url) as store:
        run_id = store.start_run(name="h200", cluster=CLUSTER, preset="quick")
        with writing(url, run_id, MEASURED):
            before = len(store.samples(run_id))
            with closing(sqlite3.connect(tmp_path / "moetune.db")) as shell:
                shell.execute("VACUUM INTO ?", (str(copy := tmp_path / "copy.db"),))
            after = len(store.samples(run_id))
    assert check(str(copy)) == ()
    with open_store(str(copy)) as restored:
        kept = restored.samples(run_id)
        restored.add_samples(run_id, MEASURED)
    assert before <= len(kept) <= after + BATCH
    assert kept == MEASURED * (len(kept) // BATCH)


MOUNTS = r"""
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /home tmpfs rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
server:/with\040space /mnt/with\040space fuse.sshfs rw 0 0
/dev/sdb1 /home/me/local xfs rw 0 0
""".lstrip()


@pytest.mark.parametrize(("path", "kind"), [
    ("/var/moetune.db", "ext4"), ("/home/me/moetune.db", "nfs4"),
    ("/home/me/local/moetune.db", "xfs"), ("/home/me/localised/moetune.db", "nfs4"),
    ("/homestead/moetune.db", "ext4"), ("/mnt/with space/moetune.db", "fuse.sshfs"),
])  # fmt: skip
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system(Path(path), mounts=MOUNTS) == kind


def journal_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


@pytest.mark.parametrize(
    ("kind", "journal"),
    [("ext4", "wal"), ("overlay", "wal"), ("", "wal"), ("nfs4", "delete"), ("nfs", "delete"),
     ("cifs", "delete"), ("lustre", "delete"), ("fuse.sshfs", "delete"), ("9p", "delete")],
)  # fmt: skip
def test_a_network_file_system_gets_the_journal_that_works_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, journal: str
) -> None:
    path = tmp_path / "moetune.db"
    open_store(str(path)).close()
    assert journal_of(path) == "wal"
    monkeypatch.setattr(engine, "file_system", lambda _path, *, mounts: kind if mounts else "")
    with open_store(str(path)) as store:
        store.start_run(name="h200", cluster=CLUSTER, preset="quick")
    assert journal_of(path) == journal
    upgrade(str(path))
    assert check(str(path)) == ()
