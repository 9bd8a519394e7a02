"""`moetune observe`: a run against its prediction; kept, it calibrates plans, never their order."""

import json
from pathlib import Path
from typing import Any

import pytest

import moetune
from tests.cli.running import Cli
from tests.cli.test_cli_check import H100, SCRIPT
from tests.logs.test_kineto import KERNELS, event, trace
from tests.logs.test_logs import megatron, titan

MODEL = (
    "--model", "qwen3-30b-a3b", *H100, "--world-size", "16", "--global-batch", "64", "--seq", "4k",
    "--target", "megatron",
)  # fmt: skip
TIMERS = """\
(min, max) time across ranks (ms):
    forward-compute ................................: (100.00, {forward:.2f})
    backward-compute ...............................: (100.00, {backward:.2f})
    batch-generator ................................: (1.00, {batch:.2f})
    all-grads-sync .................................: (1.00, {grads:.2f})
    optimizer ......................................: (1.00, {optimizer:.2f})"""
PEAK = "[Rank 0] (after 1 iterations) memory (MB) | max allocated: 60000.0 | max reserved: 65536.0"


def planned(cli: Cli, *flags: str) -> dict[str, Any]:
    return cli("plan", *MODEL, *flags, "--output", "plan.json", "--json").document


def scaled(values: dict[str, float], factor: float) -> Any:
    return pytest.approx({name: factor * value for name, value in values.items()}, rel=1e-12)


def test_an_observed_step_calibrates_every_time_of_the_next_plan_and_no_order(cli: Cli) -> None:
    before = planned(cli)
    step = 1.25 * before["predicted"]["step_seconds"]
    seen = cli("observe", "plan.json", "--step", f"{step}s", "--memory", "71GB", "--json").document
    assert (seen["ratio"], seen["inside"], seen["id"]) == (pytest.approx(1.25), True, 1)
    assert seen["run"]["memory_bytes"] == 71_000_000_000
    after = planned(cli)
    calibration = after["calibration"]
    assert calibration == seen["calibration"]
    factor = calibration["factor"]
    assert 1 < factor < 1.25
    assert after["id"] != before["id"]
    assert after["predicted"]["parts"] == scaled(before["predicted"]["parts"], factor)
    for old, new in zip(before["alternatives"], after["alternatives"], strict=True):
        assert new["layout"] == old["layout"]
        times = (row["predicted"]["step_seconds"] for row in (new, old))
        assert next(times) == pytest.approx(factor * next(times), rel=1e-12)
    assert [row["change"] for row in after["savings"]] == [
        row["change"] for row in before["savings"]
    ]
    sure = after["confidence"]
    assert sure["probability_best"] == pytest.approx(before["confidence"]["probability_best"])
    assert sure["p05_step_seconds"] < after["predicted"]["step_seconds"] < sure["p95_step_seconds"]
    out = cli("plan", *MODEL).out
    assert "Calibrated by 1 run of yours" in " ".join(out.split())
    again = planned(cli, "--uncalibrated")
    assert (again["predicted"], again["id"]) == (before["predicted"], before["id"])
    Path("after.json").write_text(json.dumps(after))
    words = " ".join(cli("plans", "diff", "after.json", "plan.json").out.split())
    assert (
        f"factor 1.00 of a calibration by observed runs, those of the first plan {factor:.2f}"
        in words
    )


@pytest.mark.thorough
def test_what_asks_a_calibrated_plan_keeps_its_factor(cli: Cli) -> None:
    first = planned(cli)
    cli("observe", "plan.json", "--step", f"{1.3 * first['predicted']['step_seconds']}s")
    plan = planned(cli)
    step, factor = plan["predicted"]["step_seconds"], plan["calibration"]["factor"]
    whatif = cli("whatif", "plan.json", "--constraint", "overlap=none", "--json").document
    assert whatif["after"]["calibration"] == plan["calibration"]
    slower = cli("sensitivity", "plan.json", "--json").document
    assert slower["step_seconds"] == pytest.approx(step)
    why = cli("explain", "plan.json", "--layout", "tp=2", "--json").document
    plain = planned(cli, "--uncalibrated", "--tp", "2")["predicted"]["step_seconds"]
    assert why["other"]["step_seconds"] == pytest.approx(factor * plain)
    # Observed again by its plan, the run is compared with the calibrated step, and keeps the plain.
    Path("again.json").write_text(json.dumps(plan))
    seen = cli("observe", "again.json", "--step", f"{step}s", "--no-save", "--json").document
    assert seen["ratio"] == pytest.approx(1)
    assert seen["run"]["predicted_seconds"] == pytest.approx(first["predicted"]["step_seconds"])
    assert seen["id"] is None


def test_a_log_is_held_against_its_launch_by_part_and_calibrates_the_check(cli: Cli) -> None:
    Path("run.sh").write_text(SCRIPT.replace("--global-batch-size 128", "--global-batch-size 64"))
    before = cli("check", "run.sh", *H100, "--json").document
    step, parts = before["predicted"]["step_seconds"], before["predicted"]["parts"]
    late = ("gradients", "optimizer", "between steps", "bubble and sends")
    passes = sum(seconds for name, seconds in parts.items() if name not in late)
    times = {
        "forward": 400 * passes, "backward": 600 * passes, "batch": 5.0,
        "grads": 1e3 * (parts["gradients"] + 0.1 * step), "optimizer": 1e3 * parts["optimizer"],
    }  # fmt: skip
    lines = [f"{megatron(number, 1.1 * step)}\n{TIMERS.format(**times)}" for number in range(1, 9)]
    Path("run.log").write_text("\n".join([PEAK, *lines]))
    seen = cli("observe", "run.sh", "--log", "run.log", *H100, "--json").document
    assert (seen["log"]["format"], seen["memory_scope"]) == ("megatron", "reserved")
    assert seen["run"]["memory_bytes"] == 65536 * 2**20
    most = seen["parts"][0]
    assert most["name"] == "gradients and parameters, exposed"
    assert most["share"] == pytest.approx(1 / 11, rel=1e-2)
    assert all(abs(part["share"]) < 5e-3 for part in seen["parts"][1:])
    after = cli("check", "run.sh", *H100, "--json").document
    factor = after["calibration"]["factor"]
    assert after["predicted"]["parts"] == scaled(parts, factor)
    saved = [row["seconds_saved"] for row in before["better"]]
    assert [row["seconds_saved"] for row in after["better"]] == pytest.approx(
        [factor * seconds for seconds in saved]
    )
    words = " ".join(cli("observe", "run.sh", "--log", "run.log", *H100, "--no-save").out.split())
    assert "Most of the difference: gradients and parameters, exposed" in words
    assert "The run is not kept" in words


@pytest.mark.parametrize(
    ("flags", "log", "what"),
    [
        ((), "", "by its step, its log or a trace"),
        (("--step", "2s", "--log", "run.log"), "", "by its step, its log or a trace"),
        (("--step", "2"), "", "has no unit"),
        (("--step", "0s"), "", "no step takes that"),
        (("--step", "2s", "--memory", "0GB"), "", "no run takes that"),
        (("--step", "2s", "--world-size", "8"), "", "is for launch files"),
        (("--log", "none.log"), "", "none.log cannot be read"),
        (("--log", "run.log"), "nothing", "run.log has no step"),
        (("--log", "run.log"), titan(1, 2.0), "line 1: the log is torchtitan's"),
        (("--log", "run.log"), megatron(1, 2.0, batch=32), "batch 32, and the prediction 64"),
        (("--log", "run.log"), f"  num_experts ....... 64\n{megatron(1, 2.0)}", "num experts 64"),
    ],
)  # fmt: skip
def test_what_is_no_run_of_the_plan_is_refused(
    cli: Cli, flags: tuple[str, ...], log: str, what: str
) -> None:
    planned(cli)
    Path("run.log").write_text(f"{log}\n")
    result = cli("observe", "plan.json", *flags)
    assert result.code == 2
    assert what in result.err
    assert cli("observations", "list", "--json").document["runs"] == []


def test_runs_are_listed_and_removed_and_a_notebook_observes_alike(cli: Cli) -> None:
    view = moetune.plan(
        "qwen3-30b-a3b", profile="h100-x8", world_size=16, global_batch=64, seq="4k",
        target="megatron",
    )  # fmt: skip
    seen = view.observe(step="2500ms", memory="70GB")
    assert seen.to_dict()["run"]["seconds"] == 2.5
    assert "A step takes 2.50 s" in str(seen)
    cli("observe", view.id[:12], "--step", "2.6s")
    rows = cli("observations", "list", "--plan", view.id[:6], "--json").document["runs"]
    assert [(row["id"], row["seconds"]) for row in rows] == [(2, 2.6), (1, 2.5)]
    assert "r2" in cli("observations", "list").out
    assert cli("observations", "remove", "x1").code == 2
    assert cli("observations", "remove", "r1", "r2").code == 0
    assert cli("observations", "list", "--json").document["runs"] == []
    assert "calibration" not in planned(cli)


def test_runs_of_a_profile_as_it_was_before_calibrate_nothing_and_say_so(cli: Cli) -> None:
    planned(cli)
    cli("observe", "plan.json", "--step", "2.5s")
    lab = cli("profiles", "export", "h100-x8").out
    Path("h100.toml").write_text(lab.replace("efficiency = 0.92", "efficiency = 0.91"))
    changed = cli("plan", *MODEL[:2], "--profile", "h100.toml", *MODEL[4:], "--json")
    assert "calibration" not in changed.document
    assert "profile h100-x8 has changed since its 1 observed run" in changed.err


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_trace_says_what_is_hidden_and_is_not_kept(cli: Cli, recompute: str) -> None:
    planned(cli, "--recompute", recompute)
    product, exchange = (
        next(name for name, kind in KERNELS.items() if kind.startswith(word))
        for word in ("matrix", "exchanges")
    )
    events = [
        event("ProfilerStep#3", 0.0, 3e6, "gpu_user_annotation"), event(product, 0.0, 2e6),
        event(exchange, 1.5e6, 2.5e6),
    ]  # fmt: skip
    seen = cli("observe", "plan.json", "--trace", str(trace(Path("run.json"), events)), "--json")
    document = seen.document
    assert (document["run"]["seconds"], document["id"]) == (3.0, None)
    parts = {part["name"]: part["seconds"] for part in document["parts"]}
    assert parts["matrix products"] == pytest.approx(2.0)
    assert parts["exchanges of tokens, exposed"] == pytest.approx(0.5)
    assert parts["idle"] == pytest.approx(0.5)
    predicted = sum(part["predicted_seconds"] for part in document["parts"])
    assert predicted == pytest.approx(document["predicted"]["step_seconds"])
    words = " ".join(cli("observe", "plan.json", "--trace", "run.json").out.split())
    assert "Of 1.00 s of exchanges of tokens in a step, 50 % are hidden." in words
    assert "not kept: a profiler makes steps longer" in words
