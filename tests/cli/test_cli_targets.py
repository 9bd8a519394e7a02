"""Runtimes by version, and pinned layouts that they refuse."""

from tests.cli.running import Cli

PLAN = (
    "plan", "--profile", "h100-x8", "--global-batch", "96", "--seq", "6144", "--world-size", "48",
)  # fmt: skip


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


def test_a_plan_and_its_export_have_the_version_that_was_asked_for(cli: Cli) -> None:
    plan = cli(*PLAN, "--model", "olmoe", "--target", "bridge@0.4", "--output", "plan.json")
    assert "bridge@0.4.2" in plan.out
    assert (
        cli("export", "plan.json", "--to", "bridge", "--json").document["version"].endswith("0.4.2")
    )
    other = cli("export", "plan.json", "--to", "megatron@0.16")
    assert "megatron (megatron-core 0.16.1)" in other.out
    assert "Planned for bridge@0.4" in other.out
