"""A plan, its explanation, its timeline and what the service answers are one truth."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import OLMOE, Cli

SIZES = ("--d-model", "1024", "--d-hidden", "8192", "--num-experts", "64", "--top-k", "2")
TOP2 = (*SIZES, "--tokens", "4096", "--dtype", "float16", "--profile", "rtx2080ti-x64")
BERT = ("--model", "bert-l", "--profile", "rtx2080ti-x64")
A100 = ("--model", "bert-l", "--world-size", "4", "--profile", "a100-x4")


@pytest.mark.parametrize("arguments", [
    (*TOP2, "--order", "interleaved"),
    (*TOP2, "--order", "dispatch_first"),
    (*BERT, "--strategy", "S4", "--order", "interleaved"),
    (*BERT, "--forward-degree", "5", "--order", "interleaved", "--max-degree", "8"),
    (*A100, "--strategy", "S2", "--backward-degree", "3"),
])  # fmt: skip
def test_the_plans_row_of_the_strategies_is_the_plan(cli: Cli, arguments: tuple[str, ...]) -> None:
    plan = cli("plan", *arguments, "--json").document
    document = cli("explain", plan["id"], "--json").document
    (row,) = (strategy for strategy in document["strategies"] if strategy["is_chosen"])
    pipeline, memory, predicted = plan["pipeline"], plan["memory"], plan["predicted"]
    assert row["step_seconds"] == predicted["step_seconds"]
    assert row["strategy"] == memory["strategy"]
    assert row["forward_degree"] == document["forward"]["degree"] == pipeline["forward_degree"]
    assert row["backward_degree"] == document["backward"]["degree"] == pipeline["backward_degree"]
    assert row["needed_bytes"] == sum(
        memory[f"{part}_bytes"] for part in ("state", "activation", "buffer")
    )
    assert document["forward"]["seconds"] == predicted["forward_seconds"]
    assert document["backward"]["seconds"] == predicted["backward_seconds"]
    _check_losers(plan, document["strategies"])
    assert cli("trace", plan["id"], "--output", "step.json").code == 0
    _check_timeline(plan, json.loads(Path("step.json").read_text(encoding="utf-8")))


def _check_losers(plan: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Hold the rows of other strategies against the alternatives that the plan names."""
    lost = {
        row["strategy"]: row
        for row in plan["alternatives"]
        if row["strategy"] != plan["memory"]["strategy"]
    }
    for row in rows:
        if row["strategy"] in lost:
            other = lost[row["strategy"]]
            for key in ("forward_degree", "backward_degree", "step_seconds", "lost_because"):
                assert row[key] == other[key], (row["strategy"], key)


def _check_timeline(plan: dict[str, Any], document: dict[str, Any]) -> None:
    assert document["schema"] == "moetune.timeline/2"
    ends = {
        phase: max(
            event["ts"] + event["dur"]
            for event in document["traceEvents"]
            if event["ph"] == "X" and event["name"].startswith(phase)
        )
        for phase in ("forward", "backward")
    }
    predicted = plan["predicted"]
    forward = predicted["forward_seconds"]
    assert ends["forward"] == pytest.approx(1e6 * forward, rel=1e-9)
    assert ends["backward"] == pytest.approx(1e6 * (forward + predicted["backward_seconds"]))


def test_the_explanation_of_a_plan_file_needs_no_profile(cli: Cli) -> None:
    cli("profiles", "export", "rtx2080ti-x64", "--output", "lab.toml")
    text = Path("lab.toml").read_text(encoding="utf-8").replace('"rtx2080ti-x64"', '"lab"')
    Path("lab.toml").write_text(text, encoding="utf-8")
    arguments = ("--model", "bert-l", "--profile", "lab.toml", "--no-save", "--output", "plan.json")
    assert cli("plan", *arguments).code == 0
    known = cli("explain", "plan.json", "--profile", "lab.toml", "--json").document
    document = cli("explain", "plan.json", "--json").document
    assert "there is no profile 'lab'" in document.pop("note")
    assert {**document, "note": ""} == known
    assert known["strategies"]


def test_the_terms_are_part_of_the_plan_file(cli: Cli) -> None:
    plan = cli("plan", *BERT, "--json").document
    document = cli("explain", plan["id"], "--json").document
    assert plan["schema"] == 2
    assert plan["terms"] == {key: document[key] for key in ("forward", "backward", "strategies")}


def traced(cli: Cli, folder: Path, *pins: str) -> tuple[Any, list[Any], str]:
    """Return the plan, its bars, and what was said."""
    file, out = folder / "plan.json", folder / "trace.json"
    plan = cli("plan", *OLMOE, "--world-size", "16", "--micro-batch", "1", *pins, "--json",
               "--output", str(file)).document  # fmt: skip
    said = cli("trace", str(file), "--output", str(out)).out
    return plan, json.loads(out.read_text())["traceEvents"], said


def test_every_rank_runs_every_micro_batch_and_the_last_ends_the_step(
    cli: Cli, tmp_path: Path
) -> None:
    plan, events, _ = traced(
        cli, tmp_path, "--pp", "4", "--schedule", "interleaved", "--global-batch", "64"
    )
    ranks = [row["pid"] for row in events if "pipeline rank" in str(row["args"].get("name", ""))]
    assert ranks == [0, 1, 2, 3]
    bars = [event for event in events if event["ph"] == "X" and event["pid"] in ranks]
    end_microseconds = max(bar["ts"] + bar["dur"] for bar in bars)
    assert end_microseconds / 1e6 == pytest.approx(plan["predicted"]["step_seconds"], rel=1e-9)
    layout = plan["layout"]
    num_micro_batches = 64 // layout["dp"]
    passes = Counter(
        (bar["pid"], bar["args"]["stage"], bar["args"]["micro_batch"])
        for bar in bars
        if bar["name"].startswith("forward")
    )
    assert {*passes.values()} == {1}
    assert len(passes) == 4 * max(layout["vpp"], 1) * num_micro_batches
    for rank in ranks:
        spans = sorted((bar["ts"], bar["dur"]) for bar in bars if bar["pid"] == rank)
        overlaps = [
            before + lasts - after for (before, lasts), (after, _) in itertools.pairwise(spans)
        ]
        assert max(overlaps) < 1e-3, "a rank computes one pass at a time"


def test_a_long_step_is_cut(cli: Cli, tmp_path: Path) -> None:
    _, events, said = traced(cli, tmp_path, "--pp", "2", "--global-batch", "65536")
    assert "Passes of the first" in said
    assert len(events) < 50_000
