"""What was acknowledged is there, whoever is killed, and a backup has all of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moetune.store import backup, check, open_store

WORKER = Path(__file__).with_name("planner_worker.py")
NUM_THREADS, NUM_OBSERVATIONS = 4, 3


class Answers:
    """The ids that a worker has acknowledged."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.ids: list[str] = []

    def wait(self, count: int) -> None:
        """Wait for so many more."""
        assert self.process.stdout is not None
        for _ in range(count):
            line = self.process.stdout.readline()
            assert line, "the worker has ended"
            self.ids.append(line.strip())

    def kill(self) -> None:
        """End it at once, and take what it had acknowledged before."""
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.ids += [line for line in self.process.stdout.read().split("\n") if len(line) == 64]


@contextmanager
def answering(url: str) -> Iterator[Answers]:
    process = subprocess.Popen([sys.executable, WORKER, url], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield Answers(process)
        finally:
            process.kill()


def test_every_plan_and_observation_that_was_acknowledged_survives_kill_9(url: str) -> None:
    acknowledged: list[str] = []
    open_store(url).close()
    for _ in range(2):
        with answering(url) as answers:
            answers.wait(30)
            answers.kill()
            acknowledged += answers.ids
    assert check(url) == ()
    with open_store(url, read_only=True) as store:
        for plan_id in acknowledged:
            assert store.plan(plan_id) is not None
            # The second worker is asked the same, and acknowledges what is there.
            assert len(store.observations(plan_id)) >= NUM_OBSERVATIONS
        stored = store.plans()
        # Batches are whole, and at most one of each thread was not acknowledged.
        counts = [len(store.observations(one.id)) for one in stored]
        assert all(count % NUM_OBSERVATIONS == 0 for count in counts)
        assert len(stored) <= len(set(acknowledged)) + 2 * NUM_THREADS


def test_a_backup_under_load_has_everything_acknowledged_before_it(
    url: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = url.startswith("sqlite")
    if not is_file:
        programs = request.getfixturevalue("programs")
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    open_store(url).close()
    with answering(url) as answers:
        for number in range(3):
            answers.wait(10)
            copy = backup(url, tmp_path / f"copy-{number}.db")
            if not is_file:
                continue
            assert check(str(copy)) == ()
            with open_store(str(copy), read_only=True) as store:
                for plan_id in answers.ids:
                    assert len(store.observations(plan_id)) == NUM_OBSERVATIONS
        answers.wait(10)  # and the work went on
