"""Whole models of the papers and by their sizes through the command line."""

from pathlib import Path

import pytest

from moetune.app.files import profile_to_toml
from tests.cli.running import Cli
from tests.solve.clusters import cluster_profile

PLAN = ("plan", "--model", "ppmoe-6.7b", "--world-size", "32", "--profile", "v100-x256")
SMALL = ("plan", "--d-model", "64", "--d-hidden", "256", "--num-experts", "8", "--num-layers", "4",
         "--num-heads", "4", "--seq", "128", "--vocab", "1000", "--world-size", "8",
         "--global-batch", "64", "--profile", "a100-x8")  # fmt: skip
SIZES = (
    "num-layers=4,num-heads=4,d-model=64,d-hidden=256,num-experts=8,top-k=1,activation=gelu,"
    "moe-every=2,seq=128,vocab=1000"
)


def test_a_papers_model_answers_as_any_other_with_its_batch(cli: Cli) -> None:
    result = cli(*PLAN)
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.out.splitlines())
    words = " ".join(result.out.split())
    assert "ppmoe-6.7b · 32 GPUs" in words
    assert "the rate of the memory; the data sheet's stands in" in words
    plan = cli(*PLAN, "--json").document
    inputs = plan["inputs"]
    assert (inputs["global_batch"], inputs["seq"], inputs["dtype"]) == (256, 2048, "float16")
    assert (inputs["target"], inputs["model"]) == ("moetune", "ppmoe-6.7b")
    layout = plan["layout"]
    assert layout["dp"] * layout["tp"] * layout["pp"] == 32


def test_ppmoes_layout_gathers_tokens_over_the_ranks_that_share_tensors(cli: Cli) -> None:
    pins = ("--tp", "8", "--pp", "4", "--ep", "8", "--dispatcher", "all_gather")
    plan = cli(*PLAN, *pins, "--json", "--output", "plan.json").document
    layout = plan["layout"]
    assert (layout["tp"], layout["pp"], layout["ep"]) == (8, 4, 8)
    assert layout["dispatcher"] == "all_gather"
    assert plan["predicted"]["parts"]["exchange"] > 0
    exported = cli("export", "plan.json", "--to", "moetune")
    assert exported.code == 0
    assert "    dispatcher='all_gather',\n" in exported.out
    assert "parallelize_module cuts dense parts" in exported.out
    other = cli(*PLAN, "--tp", "4", "--ep", "8", "--dispatcher", "all_gather")
    assert other.code == 3
    assert "cannot run all_gather with ep 8 and tp 4" in other.err


def test_a_model_by_its_sizes_is_named_by_them_and_planned_again_by_that_name(cli: Cli) -> None:
    plan = cli(*SMALL, "--json", "--output", "plan.json").document
    assert plan["inputs"]["model"] == SIZES
    again = ("plan", "--model", SIZES, *SMALL[-6:])
    assert cli(*again, "--json").document["id"] == plan["id"]
    explained = cli("explain", "plan.json", "--layout", "tp=2", "--json").document
    assert explained["asked"] == {"tp": "2"}
    assert cli("models", "show", SIZES, "--json").document["num_layers"] == 4
    thousands = ["1k" if word == "1000" else word for word in SMALL]
    assert cli(*thousands, "--json").document["inputs"]["model"].endswith("vocab=1024")


def test_a_papers_model_takes_other_sizes(cli: Cli) -> None:
    plan = cli(*PLAN, "--num-layers", "12", "--moe-every", "3", "--json").document
    assert plan["inputs"]["model"].startswith("num-layers=12,num-heads=16,d-model=1024")
    assert "moe-every=3" in plan["inputs"]["model"]


def test_states_go_to_the_host_where_nothing_else_fits(cli: Cli) -> None:
    flags = ("plan", "--model", "gpt-2.7b", "--world-size", "1", "--profile", "a100-x4")
    result = cli(*flags, "--memory-limit", "40GiB")
    words = " ".join(result.out.split())
    assert "in host memory, 2 chunks at a time in the cache: moetune.shard" in words
    plan = cli(*flags, "--memory-limit", "40GiB", "--json", "--output", "plan.json").document
    assert plan["chunks"]["offload"]
    assert cli(*flags, "--json").document.get("chunks") is None
    assert cli("explain", "plan.json", "--layout", "micro-batch=2", "--json").code == 0
    assert cli("sensitivity", "plan.json", "--json").code == 0
    refused = cli(*flags, "--memory-limit", "40GiB", "--offload-optimizer", "0")
    assert refused.code == 3
    assert "memory binds" in refused.err


def test_models_show_the_whole_models(cli: Cli) -> None:
    document = cli("models", "show", "ppmoe-143b", "--json").document
    assert document["num_layers"] == 32
    assert document["parameters"] == pytest.approx(143e9, rel=0.01)
    assert "142.2 B" in cli("models", "show", "ppmoe-143b").out
    assert "ppmoe-143b" in cli("models", "list").out


def test_a_profile_without_the_rate_of_its_memory_is_named(cli: Cli) -> None:
    path = Path("cluster.toml")
    path.write_text(profile_to_toml(cluster_profile()), encoding="utf-8")
    result = cli(*PLAN[:-1], "./cluster.toml")
    assert result.code == 5
    assert "no time of Adam in float16" in result.err


@pytest.mark.parametrize(("command", "words"), [
    (("verify",), "is the plan of a model's training"),
    (("trace", "--nproc", "2"), "is a training plan, whose steps only its target runs"),
])  # fmt: skip
def test_what_runs_a_plan_says_that_it_runs_layers(
    cli: Cli, command: tuple[str, ...], words: str
) -> None:
    assert cli(*PLAN, "--output", "plan.json").code == 0
    result = cli(*command, "plan.json")
    assert result.code == 2
    assert words in result.err
