"""`moetune trace` of Hugging Face models' plans: every pipeline rank's passes."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Cli

OLMOE = (
    "plan", "--model", "olmoe", "--profile", "h100-x8", "--world-size", "16", "--seq", "4096",
    "--micro-batch", "1",
)  # fmt: skip


def traced(cli: Cli, folder: Path, *pins: str) -> tuple[Any, list[Any], str]:
    """Return the plan, its bars, and what was said."""
    file, out = folder / "plan.json", folder / "trace.json"
    plan = cli(*OLMOE, *pins, "--json", "--output", str(file)).document
    said = cli("trace", str(file), "--output", str(out)).out
    return plan, json.loads(out.read_text())["traceEvents"], said


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_every_rank_runs_every_micro_batch_and_the_last_one_ends_the_step(
    cli: Cli, tmp_path: Path, schedule: str
) -> None:
    plan, events, _ = traced(
        cli, tmp_path, "--pp", "4", "--schedule", schedule, "--global-batch", "64"
    )
    ranks = [one["pid"] for one in events if "pipeline rank" in str(one["args"].get("name", ""))]
    assert ranks == [0, 1, 2, 3]
    bars = [one for one in events if one["ph"] == "X" and one["pid"] in ranks]
    end_microseconds = max(one["ts"] + one["dur"] for one in bars)
    assert end_microseconds / 1e6 == pytest.approx(plan["predicted"]["step_seconds"], rel=1e-9)
    layout = plan["layout"]
    num_micro_batches = 64 // layout["dp"]
    passes = Counter(
        (one["pid"], one["args"]["stage"], one["args"]["micro_batch"])
        for one in bars
        if one["name"].startswith("forward")
    )
    assert {*passes.values()} == {1}
    assert len(passes) == 4 * max(layout["vpp"], 1) * num_micro_batches
    for rank in ranks:
        own = sorted((one["ts"], one["dur"]) for one in bars if one["pid"] == rank)
        overlaps = [
            before + lasts - after for (before, lasts), (after, _) in itertools.pairwise(own)
        ]
        assert max(overlaps) < 1e-3, "a rank computes one pass at a time"


def test_a_long_step_is_cut(cli: Cli, tmp_path: Path) -> None:
    _, events, said = traced(cli, tmp_path, "--pp", "2", "--global-batch", "65536")
    assert "Passes of the first" in said
    assert len(events) < 50_000
