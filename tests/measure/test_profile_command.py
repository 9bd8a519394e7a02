"""`moetune profile` with real ranks and a real database, interrupted in every way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moetune.domain.records import RunInfo
from moetune.domain.samples import Sample
from moetune.store import open_store
from tests.app.test_killed_launch import is_running
from tests.documents import read_document
from tests.ports import free_port

TIMEOUT_SECONDS = 240
SMALL_LAYER = ("--preset", "quick", "--dtype", "float32", "--d-model", "64", "--d-hidden", "128",
               "--num-experts", "4", "--tokens", "256", "--name", "lab")  # fmt: skip

pytestmark = pytest.mark.dist


class Desk:
    """A database of its own, and commands on it."""

    def __init__(self, folder: Path) -> None:
        self.db = str(folder / "test.db")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "moetune", "--no-config", "--db", self.db, "profile"]
        environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **variables}
        process = subprocess.Popen(
            [*command, *arguments], env=environ, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def clean(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def runs(self) -> tuple[RunInfo, ...]:
        if not Path(self.db).exists():
            return ()
        with open_store(self.db, read_only=True) as store:
            return store.runs()

    def samples(self) -> tuple[Sample, ...]:
        with open_store(self.db, read_only=True) as store:
            return store.samples(1)

    def wait_for_samples(self, count: int) -> None:
        wait_until(lambda: any(run.num_samples >= count for run in self.runs()))


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with open_store(made.db):
        pass
    yield made
    made.clean()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    pids: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            pids |= {child} | descendants(child)
    return pids


def test_a_killed_profile_keeps_its_points_and_resume_measures_only_the_rest(
    planner: Desk, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    killed = planner.start(
        *SMALL_LAYER, "--nproc", "2", TMPDIR=str(temporary),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "torch"),  # which torch makes where it is imported
    )  # fmt: skip
    planner.wait_for_samples(3)
    ranks = descendants(killed.pid)
    assert len(ranks) >= 2
    killed.kill()
    killed.wait()
    wait_until(lambda: not any(map(is_running, ranks)))
    assert list(temporary.iterdir()) == []
    before = planner.samples()
    assert len(before) >= 3
    assert [run.status for run in planner.runs()] == ["running"]
    resumed = planner.start(*SMALL_LAYER, "--nproc", "2", "--resume", "--budget", "8s", "--json")
    answer, words = resumed.communicate(timeout=TIMEOUT_SECONDS)
    assert resumed.returncode == 0, words
    document = read_document(answer)
    after = planner.samples()
    assert after[: len(before)] == before
    added = {sample.point for sample in after[len(before) :]}
    assert added
    assert added.isdisjoint({sample.point for sample in before})
    assert document["num_reused"] == len(before)
    assert document["num_samples"] == len(after)
    assert [run.status for run in planner.runs()] == ["complete"]
    with open_store(planner.db, read_only=True) as store:
        profile = store.profile("lab")
    assert profile is not None
    assert profile.gemm
    assert profile.samples == after


def test_ctrl_c_ends_with_130_and_a_partial_run(planner: Desk) -> None:
    process = planner.start(*SMALL_LAYER, "--nproc", "2")
    planner.wait_for_samples(2)
    ranks = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in words
    assert "points are stored" in words
    assert "--resume" in words
    wait_until(lambda: not any(map(is_running, ranks)))
    assert [run.status for run in planner.runs()] == ["partial"]
    assert len(planner.samples()) >= 2


def test_ranks_of_a_launch_make_one_profile(planner: Desk) -> None:
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    processes = [
        planner.start(
            *SMALL_LAYER, "--budget", "9s", "--json", RANK=rank, LOCAL_RANK=rank, **launch
        )
        for rank in ("0", "1")
    ]
    answers = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert read_document(answers[0][0])["machine"]["num_devices"] == 2
    assert answers[1][0] == ""
    (run,) = planner.runs()
    assert run.num_samples >= 3
