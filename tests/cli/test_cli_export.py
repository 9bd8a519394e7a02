"""`moetune export` through the command line; runtimes by version, and layouts they refuse."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Cli
from tests.export.plans import LAYOUT, PIPELINE, deepspeed_config, plan_document

JOB = (
    "plan", "--profile", "h100-x8", "--global-batch", "96", "--seq", "6144", "--world-size", "48",
)  # fmt: skip


@pytest.fixture
def plan(home: Path) -> str:
    (home / "work" / "plan.json").write_text(json.dumps(plan_document(PIPELINE)), encoding="utf-8")
    return "plan.json"


def test_the_file_is_stdout_and_notes_are_stderr(cli: Cli, plan: str) -> None:
    result = cli("export", plan, "--to", "megatron")
    assert result.code == 0
    assert result.out.startswith("#!/usr/bin/env bash\n")
    assert "Launch" in result.err
    assert "bash own.sh " in cli("export", plan, "--to", "megatron", "--output", "own.sh").err


def test_the_plans_runtime_is_the_target_where_none_is_named(cli: Cli, plan: str) -> None:
    target = json.loads(Path(plan).read_text(encoding="utf-8"))["inputs"]["target"]
    assert cli("export", plan).out == cli("export", plan, "--target", target).out


def test_output_writes_the_same_text(cli: Cli, plan: str) -> None:
    result = cli("export", plan, "--to", "bridge", "--output", "layout.py")
    assert result.code == 0
    assert "layout.py" in result.out
    text = Path("layout.py").read_text(encoding="utf-8")
    document = cli("export", plan, "--to", "bridge", "--json").document
    assert document["text"] == text
    assert document["schema"] == "moetune.export/1"
    assert document["version"] == "megatron-bridge 0.6.0"


def test_what_a_program_cannot_say_stands_next_to_it(cli: Cli, plan: str) -> None:
    Path(plan).write_text(json.dumps(plan_document(LAYOUT)), encoding="utf-8")
    result = cli("export", plan, "--to", "deepspeed")
    assert result.code == 0
    assert deepspeed_config(result.out)["zero_optimization"]["stage"] == 3
    assert "sequences of 4096 tokens" in result.err


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("plan.json", "--to", "colossalai"), 2, "target 'colossalai' is unknown"),
    (("plan.json", "--to", "transformers"), 3, "cannot run pp 8"),
    (("gone.json", "--to", "megatron"), 2, "gone.json"),
    (("plan.json", "--to", "megatron", "--model", "no-such"), 2, "'no-such' is unknown"),
    (("plan.json", "--to", "megatron", "--model", "qwen3-30b-a3b"), 2, "not of qwen3-30b-a3b"),
])  # fmt: skip
@pytest.mark.usefixtures("plan")
def test_wrong_input(cli: Cli, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = cli("export", *arguments)
    assert (result.code, result.out) == (code, "")
    assert words in result.err


def test_a_pinned_layout_that_the_runtime_refuses_is_priced_all_the_same(cli: Cli) -> None:
    result = cli(*JOB, "--model", "glm-4.5-air", "--target", "megatron@0.16", "--tp", "3", "--json")
    assert result.code == 3
    error = result.document
    for part in ("tp 3 with 8 key-value heads", "transformer_config.py", "megatron-core 0.16.1"):
        assert part in error["error"]
    assert "nearest that agree: --tp 4" in error["hint"]
    assert error["plan"]["layout"]["tp"] == 3
    assert error["plan"]["predicted"]["step_seconds"] > 0


def test_a_plan_and_its_export_have_the_version_that_was_asked_for(cli: Cli) -> None:
    plan = cli(*JOB, "--model", "olmoe", "--target", "bridge@0.4", "--output", "plan.json")
    assert "bridge@0.4.2" in plan.out
    assert (
        cli("export", "plan.json", "--to", "bridge", "--json").document["version"].endswith("0.4.2")
    )
    other = cli("export", "plan.json", "--to", "megatron@0.16")
    assert "megatron (megatron-core 0.16.1)" in other.out
    assert "Planned for bridge@0.4" in other.out
