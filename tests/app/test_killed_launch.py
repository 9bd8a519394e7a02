"""A launch of ranks that is killed leaves neither processes nor files."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = """
import os, sys
from tests.app.test_killed_launch import wait_for_ever
from moetune.app.launch import run_on_ranks

def tell(pid):
    print(pid, flush=True)

run_on_ranks(
    wait_for_ever, None, num_ranks=2, launch=None, environ=dict(os.environ), oversubscribe=False,
    on_message=tell,
)
"""
TIMEOUT_SECONDS = 60.0


def wait_for_ever(_: object, tell: Callable[[object], object]) -> None:
    tell(os.getpid())
    time.sleep(600)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("together", [False, True])
def test_a_launch_that_is_killed_leaves_no_rank_and_no_file(
    tmp_path: Path,
    together: bool,  # noqa: FBT001 - a case
) -> None:
    """`together`: the ranks are killed with it, as by a full machine, and can clean up nothing."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        for pid in (*ranks, process.pid) if together else (process.pid,):
            os.kill(pid, 9)
    end = time.monotonic() + TIMEOUT_SECONDS
    while any(map(is_running, ranks)):
        assert time.monotonic() < end, "the ranks did not end"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
