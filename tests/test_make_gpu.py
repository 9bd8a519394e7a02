"""`make gpu` on a machine without a GPU: every path of it, and what becomes of parts that fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS, Outcome, run_part, run_process
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import LIMIT_SECONDS, dry_scale, gpu_scale
from moetune.domain.constraints import STRATEGIES

DRY_RUN = """
import sys
for name in ("sqlalchemy", "alembic", "optuna", "scipy", "hypothesis"):
    sys.modules[name] = None
from benchmarks.gpu.__main__ import main
sys.exit(main(["--dry-run", "--folder", sys.argv[1], "--output", sys.argv[2]]))
"""


def test_every_path_runs_on_a_cpu_without_database_or_search(tmp_path: Path) -> None:
    rows, output = tmp_path / "rows", tmp_path / "output"
    command = [sys.executable, "-c", DRY_RUN, str(rows), str(output)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    scale = dry_scale()
    written = {part: list(Rows(rows, part)) for part in PARTS}
    assert [row["passed"] for row in written["tests"]] == [True]
    assert {"gemm"} <= {row["kind"] for row in written["profile"]}
    layers = {(row["ranks"], row["degree"]) for row in written["layers"]}
    assert layers == {(ranks, degree) for ranks in (1, 2) for degree in scale.degrees}
    assert all(row["seconds"] > 0 and row["deviation"] < 1e-4 for row in written["layers"])
    assert {row["strategy"] for row in written["reuse"]} == set(STRATEGIES)
    assert all(row["forward_peak_bytes"] > 0 for row in written["reuse"])
    assert [(row["name"], row["way"]) for row in written["chunks"]] == [
        (job.name, job.way) for job in scale.jobs
    ]
    assert not any("failure" in row for row in written["chunks"])
    text = (output / "gpu.md").read_text()
    for title in ("Operations", "Degrees", "Memory reuse", "Model states in"):
        assert f"## {title}" in text
    assert (output / "rows.toml").exists()


def test_a_part_alone_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert main(["--dry-run", "--part", "reuse", "--folder", str(tmp_path)]) == 0
    # No profile, no predictions: its part failed.
    assert not any("predicted_seconds" in row for row in Rows(tmp_path, "reuse"))
    assert {row["strategy"] for row in Rows(tmp_path, "reuse")} == set(STRATEGIES)


def test_a_parts_failure_is_named_and_leaves_what_it_wrote_and_the_others(tmp_path: Path) -> None:
    fails = "print('a row'); raise SystemExit(3)"
    failed = run_process("layers", [sys.executable, "-c", fails], 60.0)
    endless = run_process("reuse", [sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    good = run_process("chunks", [sys.executable, "-c", ""], 60.0)
    assert (failed.failure, good.failure) == ("ended with 3", "")
    assert "2 times its estimate" in endless.failure
    # Without a profile, layers have no predictions; a part of no rows has no section.
    Rows(tmp_path, "layers").add(
        model="small", tokens=64, ranks=1, degree=2, macs=1, seconds=0.5, deviation=0.0,
        predicted_seconds=None,
    )  # fmt: skip
    Rows(tmp_path, "chunks").add(name="1.3B", way="plain", failure="out of memory")
    text = page(tmp_path, [failed, endless, good], machine="A GPU.")
    assert "| layers | 60 s | 0 s | ended with 3 |" in text
    assert "| small | 64 | 1 | 2 | – | 500.00 | – | – | – |" in text
    assert "| 1.3B | | plain | out of memory | | | |" in text
    assert "Memory reuse" not in text


def test_where_plain_pytorch_failed_nothing_is_relative_to_it(tmp_path: Path) -> None:
    Rows(tmp_path, "chunks").add(name="1.3B", way="plain", failure="out of memory")
    Rows(tmp_path, "chunks").add(
        name="1.3B", way="fsdp2", parameters=10**9, met_parameters=10**9, tokens=1000,
        seconds=1.0, peak_bytes=2**30,
    )  # fmt: skip
    text = page(tmp_path, [], machine="A GPU.")
    assert "| 1.3B | 1.00B | fsdp2 | 1000.00 ms | 6.0 | – | 1.0 GiB |" in text


def test_a_part_that_raises_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("not a folder")
    outcome = run_part("layers", dry_scale(), tmp_path / "rows")
    assert isinstance(outcome, Outcome)
    assert outcome.failure


def test_all_parts_fit_eight_minutes_by_their_estimate() -> None:
    estimates = gpu_scale().estimates()
    assert set(estimates) == set(PARTS)
    assert sum(estimates.values()) < LIMIT_SECONDS == 480
    assert main(["--estimate"]) == 0


def test_rows_are_on_the_disk_as_they_come(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "layers")
    assert list(rows) == []
    rows.add(degree=1)
    assert json.loads((tmp_path / "layers.jsonl").read_text()) == {"degree": 1}
    rows.begin()
    assert list(rows) == []
