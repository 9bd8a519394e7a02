"""`moetune plan` of Hugging Face models: documents, pins, wrong input."""

import itertools
import json
from pathlib import Path

import pytest

from moetune.domain.units import format_bytes
from moetune.solve.model.uncertainty import LAYOUT_SPREAD, P05_RATIO, P95_RATIO, public_ratios
from tests.cli.running import OLMOE, Cli

QWEN = ("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--global-batch", "1024",
        "--seq", "4096")  # fmt: skip
PINNED = (*QWEN, "--world-size", "16", "--target", "megatron", "--tp", "2", "--pp", "2", "--vpp",
          "2", "--ep", "8", "--micro-batch", "1", "--recompute", "norm,moe_act", "--cuda-graphs",
          "none")  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = ("plan", *OLMOE, "--world-size", "16", "--target", "megatron")


def test_a_pinned_layout_is_kept_and_the_numbers_agree(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = cli(*PINNED, "--json", "--output", str(file)).document
    assert plan["layout"] | {"dispatcher": "", "overlap": ""} == {
        "dp": 4, "cp": 1, "tp": 2, "pp": 2, "vpp": 2, "ep": 8, "etp": 1, "edp": 1,
        "micro_batch": 1, "recompute": ["moe_act", "norm"], "dispatcher": "", "overlap": "",
        "zero": 1, "cuda_graphs": "none", "offload_activations": 0.0, "offload_optimizer": 0.0,
        "schedule": "interleaved", "stages": "Et*12|t*12|t*13|t*11L",
    }  # fmt: skip
    predicted, memory = plan["predicted"], plan["memory"]
    tokens = 1024 * 4096 / predicted["step_seconds"] / 16
    assert predicted["tokens_per_second_per_device"] == pytest.approx(tokens)
    flops = cli("models", "show", "qwen3-30b-a3b", "--seq", "4096", "--json").document
    assert predicted["model_tflops_per_device"] == pytest.approx(
        tokens * flops["flops_per_token"] / 1e12
    )
    assert sum(memory["parts"].values()) == pytest.approx(memory["peak_bytes"], abs=10)
    assert json.loads(file.read_text()) == plan


def test_a_model_of_a_file_is_planned(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
             "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
             "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000}
        )
    )  # fmt: skip
    plan = cli("plan", "--model", str(tmp_path), "--profile", "h100-x8", "--global-batch", "64",
               "--seq", "1k", "--json").document  # fmt: skip
    assert plan["inputs"]["world_size"] == 8
    assert plan["layout"]["vpp"] == plan["layout"]["cp"] == 1
    said = cli("plan", "--model", str(tmp_path), "--profile", "h100-x8", "--global-batch", "64",
               "--seq", "1k", "--target", "megatron").out  # fmt: skip
    assert cli(*said.rpartition("moetune ")[2].split()).code == 0


def test_nodes_are_ranks_of_the_profile(cli: Cli) -> None:
    plan = cli(*QWEN, "--nodes", "4", "--target", "megatron", "--tp", "1", "--pp", "2").out
    assert "32 GPUs" in plan


def test_a_layout_that_does_not_fit_is_priced_all_the_same(cli: Cli) -> None:
    result = cli(*QWEN, "--target", "megatron", "--tp", "1", "--pp", "1", "--ep", "1",
                 "--recompute", "none", "--json")  # fmt: skip
    assert result.code == 3
    plan = result.document["plan"]
    assert not plan["fits"]
    assert plan["layout"]["recompute"] == ["none"]
    assert plan["memory"]["peak_bytes"] > plan["inputs"]["memory_limit_bytes"]
    assert plan["predicted"]["step_seconds"] > 0


def test_a_schedule_and_stages_by_hand_are_kept_and_exported(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    stages = "Et*5|(t*6|)*7tL"
    plan = cli(
        *QWEN, "--world-size", "16", "--target", "torchtitan", "--pp", "4", "--stages", stages[:-2]
        + "|L", "--schedule", "dualpipe_v", "--micro-batch", "1", "--output", str(file), "--json",
    )  # fmt: skip
    assert plan.code == 2  # nine stages on four ranks
    stages = "Et*5|(t*6|)*6t*7L"
    plan = cli(
        *QWEN, "--world-size", "16", "--target", "torchtitan", "--pp", "4", "--stages", stages,
        "--schedule", "dualpipe_v", "--micro-batch", "1", "--output", str(file), "--json",
    )  # fmt: skip
    assert plan.document["layout"]["schedule"] == "dualpipe_v"
    assert plan.document["layout"]["stages"] == stages
    text = cli("export", str(file), "--to", "torchtitan").out
    assert 'pipeline_parallel_schedule="DualPipeV"' in text
    assert cli("export", str(file), "--to", "megatron").code == 3
    shown = cli(*PINNED, "--stages", "Et*10|(t*12|)*2t*14L").out
    assert "Et*10|(t*12|)*2t*14L" in shown


def test_exchanges_in_chunks_have_degrees_that_layers_get(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    pinned = (*QWEN, "--world-size", "16", "--ep", "8", "--pp", "2", "--micro-batch", "1",
              "--routing", "balanced")  # fmt: skip
    chunked = cli(*pinned, "--overlap", "chunks", "--output", str(file), "--json").document
    plain = cli(*pinned, "--overlap", "none", "--json").document
    degree, predicted = chunked["layout"]["degree"], chunked["predicted"]
    assert chunked["layout"]["overlap"] == "chunks"
    assert degree["forward"] == degree["backward"] > 1
    saved = plain["predicted"]["step_seconds"] - predicted["step_seconds"]
    assert predicted["saved_by_overlap_seconds"] == pytest.approx(saved)
    assert saved > 0
    assert plain["predicted"]["saved_by_overlap_seconds"] == 0
    assert chunked["memory"]["parts"] == plain["memory"]["parts"]
    assert "degree" not in plain["layout"]

    shown = cli(*pinned, "--overlap", "chunks").out
    assert f"chunks ({degree['forward']}): saves" in shown
    said = " ".join(cli("explain", str(file)).out.split())
    assert f"in {degree['forward']} chunks while experts compute" in said
    why = cli("explain", str(file), "--json").document
    assert why["saved_by_overlap_seconds"] == predicted["saved_by_overlap_seconds"]
    text = cli("export", str(file), "--to", "moetune").out
    assert f"degree=Degrees(forward={degree['forward']}, backward={degree['backward']})" in text
    refused = cli("export", str(file), "--to", "megatron")
    assert refused.code == 3
    assert "cannot run overlap chunks" in refused.err

    free = cli(*QWEN, "--world-size", "16", "--ep", "8", "--json").document
    assert free["layout"]["overlap"] == "chunks"
    assert free["predicted"]["step_seconds"] <= predicted["step_seconds"]


@pytest.mark.thorough
def test_skewed_routing_is_slower_and_a_file_is_of_the_model(cli: Cli, tmp_path: Path) -> None:
    even, skewed = (cli(*PINNED, "--vpp", "1", "--routing", routing, "--json").document
                    for routing in ("balanced", "natural"))  # fmt: skip
    assert skewed["predicted"]["step_seconds"] > even["predicted"]["step_seconds"]
    assert skewed["memory"]["peak_bytes"] > even["memory"]["peak_bytes"]
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([1] * 128))
    same = cli(*PINNED, "--vpp", "1", "--routing", str(file), "--json").document
    assert same["predicted"]["step_seconds"] == pytest.approx(even["predicted"]["step_seconds"])
    for text, word in (("[1, 2]", "2 experts"), ("one two", "one number for each")):
        file.write_text(text)
        result = cli(*PINNED, "--routing", str(file))
        assert result.code == 2
        assert word in result.err
    assert cli(*PINNED, "--routing", str(tmp_path / "none")).code == 2


def test_explain_says_where_the_step_goes_and_why_the_others_lost(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = cli(*SEARCHED, "--json", "--output", str(file)).document
    document = cli("explain", str(file), "--json").document
    step = plan["predicted"]["step_seconds"]
    assert sum(document["kinds"].values()) == pytest.approx(step)
    assert (document["plan"], document["parts"]) == (plan["id"], plan["predicted"]["parts"])
    assert document["memory"]["peak_bytes"] == plan["memory"]["peak_bytes"]
    assert document["memory"]["limit_bytes"] == plan["inputs"]["memory_limit_bytes"]
    assert document["confidence"] == plan["confidence"]
    assert len(document["alternatives"]) == len(plan["alternatives"]) > 0
    for row in document["alternatives"]:
        assert step + sum(row["differences"].values()) == pytest.approx(row["step_seconds"])
    words = cli("explain", str(file)).out
    assert "Alternatives that lost" in words
    is_tied = any(row["step_seconds"] < step for row in document["alternatives"])
    assert ("simpler layout" in words) == is_tied


def test_how_sure_a_layout_is_comes_from_the_record_of_public_runs(cli: Cli) -> None:
    plan = cli(*SEARCHED, "--json").document
    step, sure = plan["predicted"]["step_seconds"], plan["confidence"]
    assert sure["p05_step_seconds"] < step < sure["p95_step_seconds"]
    assert 0 < sure["probability_best"] < 1
    assert sure["expected_regret"] > 0
    page = (ROOT / "docs/results/public-runs.md").read_text()
    for words, (low, high) in {
        "Megatron and Bridge": (P05_RATIO, P95_RATIO), "torchtitan": public_ratios("torchtitan")
    }.items():  # fmt: skip
        [line] = [line for line in page.splitlines() if line.startswith(f"- {words}, measured")]
        assert f"{low:.2f} to {high:.2f} (5 % and 95 %)" in line
        assert words == "torchtitan" or f"±{LAYOUT_SPREAD:.2f}" in line


def test_launches_that_hold_the_devices_up_are_named_with_what_helps(cli: Cli) -> None:
    pins = ("--tp", "2", "--pp", "1", "--ep", "8", "--micro-batch", "1", "--overlap", "none")
    shown = " ".join(cli(*SEARCHED, *pins).out.split())
    assert "The host's launches bind" in shown
    assert "--micro-batch 8 would save" in shown
    assert "--cuda-graphs full" in shown
    replayed = cli(*SEARCHED, *pins, "--cuda-graphs", "partial", "--json").document
    plain = cli(*SEARCHED, *pins, "--cuda-graphs", "none", "--json").document
    assert replayed["predicted"]["step_seconds"] < plain["predicted"]["step_seconds"]


def test_a_training_plan_is_stored_and_known_by_its_id(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = cli(*PINNED, "--json", "--output", str(file))
    plan = made.document
    short = plan["id"][:8]
    assert "saved" in made.err
    [listed] = cli("plans", "list", "--json").document["plans"]
    assert listed["id"] == plan["id"]
    assert cli("plans", "show", short, "--json").document == plan
    assert plan["inputs"]["model"] in cli("plans", "show", short).out
    for command in (("explain",), ("export", "--to", "megatron")):
        by_id, by_file = (
            cli(command[0], name, *command[1:], "--json").document for name in (short, str(file))
        )
        assert by_id == by_file
    other = cli(*QWEN, "--world-size", "32", "--target", "megatron", "--json").document["id"]
    words, table = cli("plans", "diff", short, other[:8]).out.split("Differences")
    assert "A step takes" in words
    assert "32 ranks instead of" in words
    assert "micro-batch" in table
    assert "embedding" in table
    assert "omit --nproc" in cli("trace", short, "--nproc", "2").err
    refused = cli("verify", short)
    assert refused.code == 2
    assert "is the plan of a model's training" in refused.err
    assert f"moetune export {short[:6]} --target megatron" in refused.err
    cli("plans", "remove", short)
    assert cli("plans", "show", short).code == 2


def test_a_training_plan_is_not_stored_where_it_is_not_wanted_or_does_not_fit(cli: Cli) -> None:
    assert "not saved" in cli(*PINNED, "--no-save").err
    assert cli(*PINNED, "--memory-limit", "1GiB").code == 3
    assert cli("plans", "list", "--json").document["plans"] == []


@pytest.mark.thorough
def test_the_front_has_the_fastest_layout_for_each_memory(cli: Cli) -> None:
    asked = (*SEARCHED, "--front")
    plan = cli(*asked, "--json").document
    sizes = [layout["memory"]["peak_bytes"] for layout in plan["front"]]
    steps = [layout["predicted"]["step_seconds"] for layout in plan["front"]]
    assert sizes == sorted(sizes)
    assert steps == sorted(steps, reverse=True)
    limit, best = plan["inputs"]["memory_limit_bytes"], plan["predicted"]["step_seconds"]
    fastest = min(step for size, step in zip(sizes, steps, strict=True) if size <= limit)
    assert best == pytest.approx(fastest, rel=0.02)
    shown = cli(*asked).out
    assert "The fastest layout for each memory" in shown
    assert all(format_bytes(more - less) in shown for less, more in itertools.pairwise(sizes))
    assert plan["id"] == cli(*SEARCHED, "--json").document["id"]


@pytest.mark.parametrize(("flags", "hint"), [
    (("glm-4.5-air", "--profile", "rtx4090-x8"), "take more ranks, or devices with more memory"),
    (("glm-4.5-air", "--profile", "rtx4090-x8", "--recompute", "none"),
     "take more ranks, or devices with more memory; leave more of the layout to the solver"),
    (("longcat-flash", "--profile", "h200-x8"),
     "take devices with more memory, or another --target"),
])  # fmt: skip
def test_a_hint_of_memory_has_only_what_helps(cli: Cli, flags: tuple[str, ...], hint: str) -> None:
    """Pins that are not there, and ranks where each gathers more than a device has."""
    refused = cli("plan", "--target", "transformers", "--world-size", "16", "--global-batch", "32",
                  "--seq", "4k", "--model", *flags)  # fmt: skip
    assert refused.code == 3
    assert "memory binds" in refused.err
    assert refused.err.rstrip().splitlines()[-1].strip() == hint


def test_a_layers_plan_is_not_exported(cli: Cli) -> None:
    plan = cli("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--dtype", "float16",
               "--json").document["id"]  # fmt: skip
    refused = cli("export", plan[:8], "--to", "megatron")
    assert refused.code == 2
    assert "is the plan of a layer" in refused.err
