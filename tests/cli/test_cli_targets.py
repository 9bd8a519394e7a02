"""Runtimes by version, and pinned layouts that they refuse."""

import pytest

from tests.cli.running import Cli

PLAN = (
    "plan", "--profile", "h100-x8", "--global-batch", "96", "--seq", "6144", "--world-size", "48",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--target", "bridge@0.3", "--overlap", "chunks"),
         "bridge (megatron-bridge 0.3.1) cannot run overlap chunks"),
        (("--overlap", "chunks", "--ep", "1", "--etp", "1"), "overlap chunks with ep 1"),
        (("--optimizer", "adam-bf16"), "adam-bf16"),
        (("--target", "torchtitan", "--etp", "2", "--tp", "2"), "etp 2"),
        (("--target", "megatron", "--pp", "2", "--schedule", "zero_bubble"), "zero_bubble"),
    ],
)  # fmt: skip
def test_what_the_runtime_refuses_is_named(cli: Cli, flags: tuple[str, ...], word: str) -> None:
    result = cli(*PLAN, "--model", "qwen3-30b-a3b", *flags)
    assert result.code == 3
    assert word in result.err


def test_a_pinned_layout_that_the_runtime_refuses_is_priced_all_the_same(cli: Cli) -> None:
    result = cli(*PLAN, "--model", "glm-4.5-air", "--target", "megatron@0.16", "--tp", "3",
                 "--json")  # fmt: skip
    assert result.code == 3
    error = result.document
    for part in ("tp 3 with 8 key-value heads", "transformer_config.py", "megatron-core 0.16.1"):
        assert part in error["error"]
    assert "nearest that agree: --tp 4" in error["hint"]
    assert error["plan"]["layout"]["tp"] == 3
    assert error["plan"]["predicted"]["step_seconds"] > 0


def test_a_model_that_the_runtime_does_not_have_is_refused_by_name(cli: Cli) -> None:
    result = cli(*PLAN, "--model", "mixtral-8x7b", "--target", "bridge")
    assert result.code == 3
    assert "mixtral-8x7b: it has no recipe" in result.err


def test_an_unknown_version_is_refused_with_the_known_ones(cli: Cli) -> None:
    result = cli(*PLAN, "--model", "olmoe", "--target", "megatron@0.2")
    assert result.code == 2
    assert "version '0.2' of megatron is unknown" in result.err
    assert "megatron@0.16, megatron@0.17" in result.err


def test_a_plan_and_its_export_have_the_version_that_was_asked_for(cli: Cli) -> None:
    plan = cli(*PLAN, "--model", "olmoe", "--target", "bridge@0.4", "--output", "plan.json")
    assert "bridge@0.4.2" in plan.out
    assert (
        cli("export", "plan.json", "--to", "bridge", "--json").document["version"].endswith("0.4.2")
    )
    other = cli("export", "plan.json", "--to", "megatron@0.16")
    assert "megatron (megatron-core 0.16.1)" in other.out
    assert "Planned for bridge@0.4" in other.out
