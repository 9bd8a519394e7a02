"""The end of a script under gloo: its own status and output, and nothing left to wait for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.comm.process_group import wait_for_workers

EARLIER = "an earlier handler\n"
Endings = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Endings:
    """Return status and output of every rank, by how its script ended."""
    program = [sys.executable, "-m", "tests.comm.leaving", str(tmp_path_factory.mktemp("ranks"))]
    alone = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(program, env=alone, check=True, capture_output=True, timeout=100)
    ended: Endings = json.loads(process.stdout)
    return ended


@pytest.mark.parametrize(
    ("ending", "status", "output"),
    [
        ("plainly", 0, "ended" + EARLIER),
        ("with_status_3", 3, EARLIER),
        ("with_the_group_destroyed", 0, "ended" + EARLIER),
    ],
)
def test_a_script_ends_as_it_would_without_gloo(
    endings: Endings, ending: str, status: int, output: str
) -> None:
    assert [tuple(rank) for rank in endings[ending]] == [(status, output)] * 2


def test_an_exception_keeps_its_status_and_traceback(endings: Endings) -> None:
    for status, output in endings["with_an_exception"]:
        assert status == 1
        assert "ValueError: of the script's own" in output
        assert "terminate" not in output
        assert output.endswith(EARLIER)


def test_a_process_without_gloo_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Threads of another kind are there; those of this process may be gloo's, from other tests."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tpython\nState:\tR (running)\n")
    monkeypatch.setattr("moetune.comm.process_group._THREADS", tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("nothing to wait for"))

    wait_for_workers()
