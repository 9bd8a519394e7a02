"""Whole models through the command line: plan, explain, models, and what is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from moetune.domain.layer import LayerKey
from moetune.domain.plan import plan_from_json
from moetune.domain.profile import CopyLine
from moetune.domain.samples import Direction
from moetune.runtime.plans.book import PlanBook
from moetune.workflows.files import profile_to_toml
from tests.cli.running import Cli
from tests.solve.clusters import cluster_profile

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
PLAN = (
    "plan", "--model", "ppmoe-6.7b", "--world-size", "32", "--profile", "./cluster.toml",
    "--dtype", "float16",
)  # fmt: skip
SMALL = (
    "plan", "--d-model", "64", "--d-hidden", "256", "--num-experts", "8", "--num-layers", "4",
    "--num-heads", "4", "--seq", "128", "--vocab", "1000", "--world-size", "8", "--tokens", "1k",
    "--profile", "./cluster.toml",
)  # fmt: skip
WHOLE_KEYS = {
    "num_layers", "model_flops_per_second_per_device", "moe_every", "micro_batch_sequences",
    "micro_batch_tokens", "num_micro_batches",
    "zero", "recompute", "step_seconds", "tokens_per_second_per_rank", "memory", "parts", "binding",
    "stages", "confidence",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cluster(home: Path) -> Path:
    path = home / "work" / "cluster.toml"
    path.write_text(profile_to_toml(cluster_profile()), encoding="utf-8")
    return path


def test_plan_of_a_whole_model_answers_in_words_then_tables_in_80_columns(cli: Cli) -> None:
    result = cli(*PLAN)
    assert result.code == 0
    lines = result.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("GPT-3 Medium with experts · 24 layers, every 2nd with experts")
    words = " ".join(result.out.split())
    assert "tokens a second and GPU" in words
    assert words.index("One step of the model") < words.index("dp ep tp pp experts")
    for part in ("first all_to_all", "experts", "attention", "head and loss", "bubble"):
        assert part in words
    assert "chosen" in words
    assert "moetune verify" not in words


def test_json_of_a_whole_model_has_its_part_and_the_layers(cli: Cli) -> None:
    plan = cli(*PLAN, "--json").document
    whole = plan["transformer"]
    assert set(whole) == WHOLE_KEYS
    part = {"name", "layer_seconds", "forward_seconds", "seconds", "share"}
    assert all(set(one) == part for one in whole["parts"])
    assert plan["inputs"]["constraints"] == {}
    assert plan["inputs"]["tokens_per_rank"] == 16_384
    layout = plan["layout"]
    assert layout["dp"] * layout["tp"] * layout["pp"] == 32


def test_pins_are_kept_and_recorded_by_flag_name(cli: Cli) -> None:
    pins = (
        "--tp", "8", "--pp", "4", "--expert-parallel", "tensor", "--micro-batch", "2",
        "--zero", "0", "--moe-every", "4",
    )  # fmt: skip
    plan = cli(*PLAN, *pins, "--json").document
    assert plan["layout"] == {"expert_parallel": "tensor", "dp": 1, "ep": 1, "tp": 8, "pp": 4}
    assert plan["inputs"]["constraints"] == {
        "tp": "8", "pp": "4", "expert-parallel": "tensor", "micro-batch": "2", "zero": "false",
        "moe-every": "4",
    }  # fmt: skip
    assert plan["transformer"]["moe_every"] == 4
    assert plan["transformer"]["micro_batch_sequences"] == 2
    assert "MoE all_reduce" in {one["name"] for one in plan["transformer"]["parts"]}


def test_a_model_by_its_sizes_records_them(cli: Cli) -> None:
    plan = cli(*SMALL, "--json").document
    assert plan["inputs"]["constraints"] == {
        "num-layers": "4", "num-heads": "4", "seq": "128", "vocab": "1000",
    }  # fmt: skip
    assert plan["inputs"]["model"] is None
    batch = cli(*SMALL[:-4], "--batch", "8", "--profile", "./cluster.toml", "--json").document
    assert batch["id"] == plan["id"]


def test_explain_prints_the_parts_of_the_model_and_of_its_layer(cli: Cli) -> None:
    plan = cli(*PLAN, "--json").document
    result = cli("explain", plan["id"][:8], "--profile", "./cluster.toml")
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.out.splitlines())
    words = " ".join(result.out.split())
    parts = ("first all_to_all", "second all_to_all", "stage sends", "gradients")
    titles = ("Parts of the model's step", "Layouts", "One MoE layer · ")
    for text in (*titles, *parts, "What the time consists of"):
        assert text in words
    document = cli("explain", plan["id"][:8], "--profile", "./cluster.toml", "--json").document
    assert document["forward"]["seconds"] == plan["predicted"]["forward_seconds"]
    assert document["plan"]["transformer"]["parts"] == plan["transformer"]["parts"]


def test_explain_of_experts_in_a_tensor_group_has_the_predicted_terms(cli: Cli) -> None:
    pins = ("--tp", "8", "--expert-parallel", "tensor")
    plan = cli(*PLAN, *pins, "--json").document
    document = cli("explain", plan["id"][:8], "--profile", "./cluster.toml", "--json").document
    for phase in ("forward", "backward"):
        assert document[phase]["seconds"] == plan["predicted"][f"{phase}_seconds"]
    assert "MoE all_reduce" in cli("explain", plan["id"][:8]).out


def test_the_plan_book_finds_the_layer_by_the_ranks_that_share_its_experts(cli: Cli) -> None:
    assert cli(*PLAN, "--output", "plan.json").code == 0
    plan = plan_from_json(Path("plan.json").read_bytes(), "plan.json")
    book = PlanBook([plan])
    key = LayerKey(layer=plan.inputs.layer, num_ranks=plan.layout.ep, dtype="float16")
    assert list(book.plans_for(key)) == [plan]
    assert not book.plans_for(replace(key, num_ranks=32))


OFFLOADED = (
    "plan", "--model", "gpt-2.7b", "--memory-limit", "40GiB", "--world-size", "1", "--profile",
    "./copies.toml",
)  # fmt: skip


@pytest.fixture
def copies(home: Path) -> Path:
    """Return a profile of one device whose host can be copied to and from."""
    path = home / "work" / "copies.toml"
    lines = tuple(
        CopyLine(direction=way, pinned=True, alpha_seconds=1e-5, beta_seconds_per_byte=4e-11)
        for way in DIRECTIONS
    )
    path.write_text(profile_to_toml(replace(cluster_profile(), copy=lines)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("copies")
def test_a_dense_model_over_the_limit_fills_chunks(cli: Cli) -> None:
    plan = cli(*OFFLOADED, "--json").document
    chunks = plan["chunks"]
    assert set(chunks) == {"chunk_bytes", "cache_bytes", "scatter", "offload"}
    assert chunks["scatter"]
    assert chunks["offload"]
    assert plan["transformer"]["moe_every"] == 0
    assert plan["pipeline"]["forward_degree"] == plan["pipeline"]["backward_degree"] == 1
    assert plan["transformer"]["memory"]["total_bytes"] <= 40 * 2**30


def test_the_server_of_the_paper_offloads_what_its_device_has_no_room_for(cli: Cli) -> None:
    plan = cli(*OFFLOADED[:-1], "a100-x4", "--json").document
    assert plan["chunks"]["offload"]
    named = {part["name"]: part["seconds"] for part in plan["transformer"]["parts"]}
    assert named["optimizer"] > 0
    assert "the optimizer" not in " ".join(plan["warnings"])
    assert cli(*OFFLOADED[:-3], "2", "--profile", "a100-x4", "--json").document["chunks"]


@pytest.mark.usefixtures("copies")
def test_plan_and_explain_say_what_is_cached_what_moves_and_what_shows(cli: Cli) -> None:
    result = cli(*OFFLOADED)
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.out.splitlines())
    words = " ".join(result.out.split())
    assert "on the host (offload)" in words
    assert "at a time in the cache" in words
    assert "chunk transfers" in words
    assert "expert" not in words.split("dp ep tp pp")[0]
    plan = cli(*OFFLOADED, "--json").document
    explained = cli("explain", plan["id"][:8], "--profile", "./copies.toml")
    assert explained.code == 0
    told = " ".join(explained.out.split())
    for text in ("the cache has", "A micro-batch gathers", "are not hidden", "chunk transfers"):
        assert text in told
    assert "MoE layer" not in told


@pytest.mark.usefixtures("copies")
def test_no_offload_is_infeasible_where_nothing_else_fits(cli: Cli) -> None:
    result = cli(*OFFLOADED, "--no-offload")
    assert result.code == 3
    assert "omit --no-offload" in result.err
    plan = cli(*OFFLOADED, "--no-offload", "--memory-limit", "80GiB", "--json").document
    assert plan["chunks"] is None
    assert plan["inputs"]["constraints"] == {"no-offload": "true"}


def test_a_vocabulary_may_be_given_in_thousands(cli: Cli) -> None:
    assert SMALL[SMALL.index("--vocab") + 1] == "1000"
    thousands = ["1k" if word == "1000" else word for word in SMALL]
    constraints = cli(*thousands, "--json").document["inputs"]["constraints"]
    assert constraints["vocab"] == "1024"


def test_models_show_the_whole_models(cli: Cli) -> None:
    document = cli("models", "show", "ppmoe-143b", "--json").document
    assert document["transformer"]["num_layers"] == 32
    assert document["num_parameters"] == pytest.approx(143e9, rel=0.01)
    assert "142.2 B" in cli("models", "show", "ppmoe-143b").out
    assert "6.8 B" in cli("models", "list").out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((*PLAN, "--dp", "3"), 2, ("dp (3) does not divide the 32 ranks", "--dp 4")),
        ((*PLAN, "--pp", "32"), 2, ("32 stages cannot share 24 blocks", "--pp 16")),
        ((*PLAN, "--tp", "32"), 2, ("num_heads (16) does not divide by tp (32)", "--tp 16")),
        ((*PLAN, "--tokens", "1000"), 2, ("no whole number of sequences", "960 or 1024")),
        ((*PLAN, "--memory-limit", "2GiB"), 3, ("memory binds", "parameters", "64 ranks")),
        ((*PLAN, "--strategy", "S4"), 2, ("strategy S4 is not planned in a whole model",)),
        ((*PLAN, "--vocab", "17m"), 2, ("--vocab must be from 1 to 16777216",)),
        ((*PLAN, "--moe-every", "25"), 2, ("moe_every (25) is larger than num_layers",)),
        ((*PLAN, "--world-size", "24", "--dp", "24"), 5, ("for 24 ranks", "--allow-modelled")),
        (SMALL[:-8] + SMALL[-6:], 2, ("a whole model lacks --vocab",)),
        (
            ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--dp", "2"),
            2,
            ("--dp is for a whole model", "--num-layers"),
        ),
        (
            ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--no-offload"),
            2,
            ("--no-offload is for a whole model",),
        ),
        (
            ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--pp", "2"),
            2,
            ("--pp is for a whole model",),
        ),
        (
            ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--moe-every", "2"),
            2,
            ("--moe-every is for a whole model, and gpt-s is one layer",),
        ),
    ],
)
def test_wrong_input_about_a_whole_model_says_what_and_what_next(
    cli: Cli, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = cli(*arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    for word in words:
        assert word in result.err


@pytest.mark.parametrize("command", [("verify",), ("trace", "--nproc", "2")])
def test_what_runs_a_plan_says_that_it_runs_layers(cli: Cli, command: tuple[str, ...]) -> None:
    assert cli(*PLAN, "--output", "plan.json").code == 0
    result = cli(*command, "plan.json")
    assert result.code == 2
    assert "is for a whole model" in result.err


def test_trace_of_a_whole_model_is_its_stages(cli: Cli) -> None:
    plan = cli(*PLAN, "--output", "plan.json", "--json").document
    assert cli("trace", "plan.json", "--output", "trace.json").code == 0
    drawn = json.loads(Path("trace.json").read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in drawn if event["ph"] == "X"]
    assert len({event["tid"] for event in events}) == plan["layout"]["pp"]
    num_passes = 2 * plan["layout"]["pp"] * plan["transformer"]["num_micro_batches"]
    assert sum(event["cat"] == "comp" for event in events) == num_passes
