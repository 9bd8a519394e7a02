"""`moetune sensitivity`, against slopes by hand."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.cli.running import OLMOE, XL, Cli, Planned

LAB = str(Path(__file__).parents[1] / "golden" / "lab.toml")
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "sensitivity.json"
T, M, H, BYTES = 8192, 2048, 8192, 2
TRAINING = (*OLMOE, "--world-size", "8", "--target", "megatron", "--zero", "1")


class Lines:
    """The α–β lines of a profile, and gpt-xl's step by the closed form of the makespan."""

    def __init__(self, profile: dict[str, Any]) -> None:
        gemm = next(row for row in profile["gemm"] if row["dtype"] == "float16")
        wire = next(
            row
            for row in profile["collective"]
            if row["op"] == "all_to_all" and row["group_size"] == 64
        )
        self.alpha, self.beta = wire["alpha_seconds"], wire["beta_seconds_per_byte"]
        self.gemm = gemm["alpha_seconds"], gemm["beta_seconds_per_mac"]

    def phase(self, degree: int, num_gemms: int, *, alpha: float = 1.0, beta: float = 1.0) -> float:
        transfer: float = alpha * self.alpha + beta * self.beta * T * M * BYTES / degree
        experts: float = num_gemms * (self.gemm[0] + self.gemm[1] * T * M * H / degree)
        return max(2 * degree * transfer, 2 * transfer + degree * experts)

    def step(self, degree: int, **factors: float) -> float:
        return self.phase(degree, 2, **factors) + self.phase(degree, 4, **factors)


@pytest.fixture
def lines(cli: Cli) -> Lines:
    return Lines(cli("profiles", "show", "rtx2080ti-x64", "--json").document)


def parts_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["part"]: part for part in document["parts"]}


def test_slopes_are_those_of_the_closed_form(cli: Cli, planned: Planned, lines: Lines) -> None:
    plan = planned("plan.json", *XL)
    document = cli("sensitivity", "plan.json", "--json").document
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema_rs.validator_for(schema).validate(document)
    degree = plan["pipeline"]["forward_degree"]
    assert document["step_seconds"] == pytest.approx(lines.step(degree), rel=1e-9)
    # Forward the link binds, 2·r·t_d, and β counts 2·y; backward the experts do, 2·t_d + r·t_e.
    link = 0.01 * (2 + 2 / degree) * lines.beta * T * M * BYTES
    parts = parts_of(document)
    assert parts["all_to_all bandwidth"]["seconds_per_percent"] == pytest.approx(link, rel=1e-9)
    start = 0.01 * 2 * (degree + 1) * lines.alpha
    assert parts["all_to_all start-up"]["seconds_per_percent"] == pytest.approx(start, rel=1e-9)
    rate = 0.01 * 4 * lines.gemm[1] * T * M * H
    assert parts["gemm rate"]["seconds_per_percent"] == pytest.approx(rate, rel=1e-9)
    assert document["parts"][0]["part"] == "all_to_all bandwidth"
    assert "bandwidth of all-to-alls most: 344 µs for every percent" in document["words"][0]


def test_neighbours_are_the_plans_with_that_pin(cli: Cli, planned: Planned) -> None:
    plan = planned("plan.json", *XL)
    document = cli("sensitivity", "plan.json", "--json").document
    more_chunks = plan["pipeline"]["forward_degree"] + 1
    rows = {knob["choice"]: knob for knob in document["knobs"]}
    pinned = cli("plan", *XL, "--forward-degree", str(more_chunks), "--json").document
    more = pinned["predicted"]["step_seconds"] - document["step_seconds"]
    assert rows[f"{more_chunks} chunks, strategy none"]["seconds"] == pytest.approx(more, rel=1e-9)
    memory = next(knob for knob in document["knobs"] if knob["knob"] == "memory-limit")
    assert memory["seconds"] == 0
    assert [knob["seconds"] for knob in document["knobs"]] == sorted(
        knob["seconds"] for knob in document["knobs"]
    )


def test_more_memory_saves_what_the_plan_with_more_memory_saves(cli: Cli, planned: Planned) -> None:
    tight = planned("p.json", *XL, "--memory-limit", "900MiB")
    roomy = cli("plan", *XL, "--memory-limit", "1924MiB", "--json").document
    document = cli("sensitivity", "p.json", "--json").document
    memory = next(knob for knob in document["knobs"] if knob["knob"] == "memory-limit")
    saved = roomy["predicted"]["step_seconds"] - tight["predicted"]["step_seconds"]
    assert saved < 0
    assert memory["seconds"] == pytest.approx(saved, rel=1e-9)
    assert "would save" in document["words"][-1]


def test_a_layer_is_moved_by_a_chunk_each_way(cli: Cli) -> None:
    flags = ("--d-model", "256", "--d-hidden", "1024", "--num-experts", "4", "--tokens", "1k",
             "--profile", LAB, "--max-degree", "4")  # fmt: skip
    plan = cli("plan", *flags, "--json", "--output", "plan.json").document
    document = cli("sensitivity", "plan.json", "--profile", LAB, "--json").document
    degree = plan["pipeline"]["forward_degree"]
    names = {knob["choice"] for knob in document["knobs"] if knob["knob"] == "degree"}
    near = {number for number in (degree - 1, degree + 1) if 1 <= number <= 4}
    assert names == {f"{number} chunk{'s' * (number > 1)}, strategy none" for number in near}
    assert document["step_seconds"] == plan["predicted"]["step_seconds"]


def test_a_training_plan_follows_the_parts_of_its_step(cli: Cli, planned: Planned) -> None:
    plan = planned("training.json", *TRAINING)
    document = cli("sensitivity", "training.json", "--json").document
    assert document["step_seconds"] == pytest.approx(plan["predicted"]["step_seconds"], rel=1e-9)
    parts = parts_of(document)
    exchange = plan["predicted"]["parts"]["exchange"]
    both = sum(part["seconds_per_percent"] for name, part in parts.items() if "all_to_all" in name)
    assert 0 < both <= 0.01 * exchange * 1.01
    total = sum(part["seconds_per_percent"] for part in document["parts"])
    assert 0 < total < 0.0101 * document["step_seconds"]
    out = " ".join(cli("sensitivity", "training.json").out.split())
    assert out.startswith("The step follows the ")
    assert "Parts of the machine" in out
    assert "Without effect: " in out


@pytest.mark.parametrize(("arguments", "code", "part"), [
    (("plan.json", "--profile", "rtx2080ti-x32"), 5, "is not the plan"),
    (("training.json", "--model", "qwen3-30b-a3b"), 2, "has changed"),
    (("plan.json", "--model", "olmoe"), 2, "--model is for the plans of"),
    (("old.json",), 2, "this version of moetune predicts"),
])  # fmt: skip
def test_what_cannot_be_priced_again_is_refused(
    cli: Cli, planned: Planned, arguments: tuple[str, ...], code: int, part: str
) -> None:
    planned("plan.json", *XL)
    planned("training.json", *TRAINING)
    edit("plan.json", "old.json", step_seconds=0.5)
    edit("training.json", "older.json", step_seconds=9.5)
    result = cli("sensitivity", *arguments, "--json")
    assert (result.code, result.document["exit_code"]) == (code, code)
    assert part in result.document["error"]


def edit(source: str, target: str, **changed: Any) -> None:
    """Write a plan's file with keys of `predicted` or `layout` changed."""
    document = json.loads(Path(source).read_text(encoding="utf-8"))
    for part in ("predicted", "layout"):
        known = {key: value for key, value in changed.items() if key in document[part]}
        document[part] = {**document[part], **known}
    Path(target).write_text(json.dumps(document), encoding="utf-8")


def test_attention_is_a_separate_part_in_a_training(cli: Cli, planned: Planned) -> None:
    plan = planned("plan.json", *TRAINING, "--tp", "1", "--pp", "1", "--ep", "8")
    step, parts = plan["predicted"]["step_seconds"], plan["predicted"]["parts"]
    rows = parts_of(cli("sensitivity", "plan.json", "--json").document)
    share = parts["core_attn"] / step / 100  # of which collectives of gradients hide some
    assert 0.8 * share < rows["attention"]["share_per_percent"] <= 1.001 * share
    gemms = sum(parts[name] for name in ("experts", "attention", "head"))
    assert rows["gemm rate"]["share_per_percent"] < 1.01 * gemms / step / 100
