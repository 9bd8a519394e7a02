"""`moetune compare`: each choice is its own plan, what is dominated is so, and errors are named."""

from pathlib import Path

import pytest

from moetune.app.requests import served_question
from moetune.app.whatif import arguments_of
from moetune.domain.any_plan import plan_from_document
from tests.cli.running import Cli, Result

PROFILES = ("h100-x8", "rtx4090-x8", "b200-x8")
PRICES = dict(zip(PROFILES, (2.0, 0.4, 9.0), strict=True))
ASKED = ("--global-batch", "256", "--seq", "4k", "--train-tokens", "500B", "--utilization", "0.8")


def compare(
    cli: Cli, *more: str, profiles: str = ",".join(PROFILES), sizes: str = "8,32",
    model: str = "qwen3-30b-a3b",
) -> Result:  # fmt: skip
    where = ("--profiles", profiles, "--world-sizes", sizes)
    return cli("compare", model, *where, *ASKED, *more)


def test_each_choice_is_its_plan_and_the_dominated_are_beaten_in_both(cli: Cli) -> None:
    price = ",".join(f"{name}={price}" for name, price in PRICES.items())
    result = compare(cli, "--price", price, "--output", "all.html", "--json")
    assert result.code == 0
    choices = result.document["choices"]
    places = [(row["profile"], row["world_size"]) for row in choices]
    assert places == [(name, size) for name in PROFILES for size in (8, 32)]
    refused = [row for row in choices if "word" in row]
    assert [(row["profile"], row["world_size"], row["word"]) for row in refused] == [
        ("rtx4090-x8", 8, "too large")
    ]
    assert "memory binds" in refused[0]["error"]
    solved = [row for row in choices if "run" in row]
    for row in solved:
        better = [
            other for other in solved
            if other["run"]["days"]["predicted"] < row["run"]["days"]["predicted"]
            and other["run"]["cost"]["predicted"] < row["run"]["cost"]["predicted"]
        ]  # fmt: skip
        assert (row["better"] is None) == (not better)
    assert {row["better"] is None for row in solved} == {True, False}
    for row in (solved[0], solved[-1]):
        plan = cli(
            "plan", "--model", "qwen3-30b-a3b", "--profile", row["profile"], "--world-size",
            str(row["world_size"]), *ASKED, "--price", str(PRICES[row["profile"]]), "--target",
            "megatron", "--json",
        ).document  # fmt: skip
        assert row["run"] == plan["run"]
        assert row["layout"] == plan["layout"]
        assert row["step_seconds"]["p95"] == plan["confidence"]["p95_step_seconds"]
    page = Path("all.html").read_text()
    assert "rtx4090-x8, 8 GPUs, megatron: memory binds" in page
    assert "<svg" in page


@pytest.mark.thorough
def test_steps_that_observed_runs_calibrate_are_named(cli: Cli) -> None:
    where = ("--model", "olmoe", "--profile", "h100-x8", "--world-size", "16")
    cli("plan", *where, *ASKED[:4], "--target", "megatron", "--output", "plan.json")
    cli("observe", "plan.json", "--step", "1.5s")
    both = {"profiles": "h100-x8,b200-x8", "sizes": "16", "model": "olmoe"}
    said = compare(cli, **both)
    assert "Calibrated by observed runs: h100-x8 for megatron by" in " ".join(said.out.split())
    plain = compare(cli, "--uncalibrated", "--json", **both).document["choices"]
    assert [row["calibration"] for row in plain] == [None, None]
    drawn = compare(cli, "--json", **both).document["choices"]
    assert drawn[0]["step_seconds"]["predicted"] > plain[0]["step_seconds"]["predicted"]
    assert drawn[1]["step_seconds"] == plain[1]["step_seconds"]


def test_the_page_has_the_figure(cli: Cli) -> None:
    asked = {"profiles": "h100-x8", "sizes": "16,32", "model": "olmoe"}
    assert compare(cli, "--output", "all.html", **asked).code == 0
    text = Path("all.html").read_text()
    assert 'data-figure="choices"' in text
    assert "h100-x8, 16 GPUs" in text


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--price", "h100-x8=2"), 2, "--price has none for b200-x8"),
        (("--price", "h100-x8=2,b200-x8=3,b300=4"), 2, "--price names 'b300', which is not asked"),
        (("--price", "h100-x8=-2,b200-x8=3"), 2, "--price must be from 0"),
        (("--target", "megatrom"), 2, "megatrom"),
        (("--world-sizes", ",".join(map(str, range(8, 280, 8)))), 2, "choices are more than 64"),
        (("--profiles", "h100-x9"), 5, "--profiles: profile 'h100-x9' is unknown"),
        (("--output", "all.png"), 2, "all.png does not end in .html"),
        (("--world-sizes", "0"), 2, "--world-sizes must be from 1"),
        (("--world-sizes", "8x"), 2, "--world-sizes: count '8x'"),
    ],
)
def test_a_wrong_value_is_an_error(
    cli: Cli, more: tuple[str, ...], code: int, message: str
) -> None:
    result = compare(cli, *more, profiles="h100-x8,b200-x8")
    assert result.code == code
    assert message in result.err


def test_a_layer_has_no_training_to_compare(cli: Cli) -> None:
    result = cli("compare", "gpt-xl", "--profiles", "h100-x8", "--world-sizes", "8")
    assert result.code == 2
    assert "gpt-xl is a layer" in result.err
    assert "--global-batch" not in result.err  # a default, which nobody typed


def test_where_nothing_fits_the_reasons_are_shown(cli: Cli) -> None:
    result = compare(cli, profiles="rtx4090-x8", sizes="4,8")
    assert result.code == 3
    assert "None of the choices has a plan" in result.out


def test_a_budget_stays_when_its_plan_is_changed_or_asked_again(cli: Cli) -> None:
    plan = cli(
        "plan", "--model", "olmoe", "--profile", "h100-x8", "--world-size", "8", *ASKED, "--price",
        "2", "--target", "megatron", "--output", "plan.json", "--json",
    ).document  # fmt: skip
    inputs = plan_from_document(plan).as_model().inputs
    assert served_question(arguments_of(inputs, None)).question.budget == inputs.budget
    changed = cli("whatif", "plan.json", "--constraint", "price=4", "--json").document
    assert changed["after"]["run"]["days"] == plan["run"]["days"]
    assert changed["after"]["run"]["cost"]["p95"] == pytest.approx(2 * plan["run"]["cost"]["p95"])
    assert "4 a GPU-hour instead of 2" in cli("whatif", "plan.json", "--constraint", "price=4").out
