"""Several real processes on one database: nothing is lost, whoever dies."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from moetune.domain.samples import CopyPoint
from moetune.store import check, open_store
from tests.store.values import CLUSTER

WORKER = Path(__file__).with_name("store_worker.py")
NUM_WRITERS, NUM_WRITES = 8, 50

Worker = subprocess.Popen[str]


@contextmanager
def worker(task: str, *arguments: object) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, WORKER, task, *map(str, arguments)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def release(workers: list[Worker]) -> None:
    """Let all of them start at once."""
    for process in workers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(process: Worker) -> list[int]:
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    return [int(line) for line in output.split()]


def test_eight_processes_writing_fifty_times_lose_nothing_while_others_read(url: str) -> None:
    with open_store(url) as store, ExitStack() as stack:
        run_id = store.start_run(name="shared", cluster=CLUSTER, preset="quick")
        writers = [
            stack.enter_context(worker("write", url, run_id, tag, NUM_WRITES, 1))
            for tag in range(NUM_WRITERS)
        ]
        readers = [
            stack.enter_context(worker("read", url, run_id, NUM_WRITERS * NUM_WRITES))
            for _ in range(2)
        ]
        release(writers + readers)
        for process in writers:
            assert finish(process) == list(range(NUM_WRITES))
        for process in readers:
            assert finish(process) == [NUM_WRITERS * NUM_WRITES]
        kept = store.samples(run_id)
    written = [
        (sample.marks[0], sample.point.num_bytes)
        for sample in kept
        if isinstance(sample.point, CopyPoint)
    ]
    assert sorted(written) == sorted(
        (str(tag), number) for tag in range(NUM_WRITERS) for number in range(NUM_WRITES)
    )
    for tag in range(NUM_WRITERS):
        mine = [number for owner, number in written if owner == str(tag)]
        assert mine == sorted(mine)


def test_processes_that_open_the_same_old_file_at_once_upgrade_it_once(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WORKER.with_name("schema_0004.sql").read_text(encoding="utf-8"))
    path.chmod(0o600)
    with ExitStack() as stack:
        starters = [stack.enter_context(worker("start", path)) for _ in range(4)]
        release(starters)
        assert len({number for process in starters for number in finish(process)}) == 4
    assert len(list(tmp_path.glob("old-before-*.db"))) == 1


def test_processes_that_open_the_same_new_database_at_once_all_get_it(url: str) -> None:
    with ExitStack() as stack:
        starters = [stack.enter_context(worker("start", url)) for _ in range(6)]
        release(starters)
        ids = [number for process in starters for number in finish(process)]
    with open_store(url) as store:
        assert sorted(run.id for run in store.runs()) == sorted(ids)
    assert len(set(ids)) == len(starters)
    assert check(url) == ()


def test_everything_acknowledged_survives_kill_9_and_every_batch_is_whole(url: str) -> None:
    size = 20
    with open_store(url) as store, ExitStack() as stack:
        run_id = store.start_run(name="killed", cluster=CLUSTER, preset="quick")
        writers = [
            stack.enter_context(worker("write", url, run_id, tag, 0, size)) for tag in range(2)
        ]
        release(writers)
        acknowledged = 0
        for tag, process in enumerate(writers):
            assert process.stdout is not None
            for _ in range(15 + 7 * tag):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
            acknowledged += 15 + 7 * tag + len(process.stdout.read().split())
        kept = Counter(
            (sample.marks[0], sample.point.num_bytes)
            for sample in store.samples(run_id)
            if isinstance(sample.point, CopyPoint)
        )
    assert set(kept.values()) == {size}
    # A batch whose acknowledgement was cut off may be there too, one of each writer.
    assert acknowledged <= len(kept) <= acknowledged + len(writers)
    assert check(url) == ()
