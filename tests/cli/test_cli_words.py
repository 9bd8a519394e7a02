"""First words of a plan, its numbers' origin and what binds; and last ones, what comes next."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from moetune.cli.plan import num_devices
from tests.cli.running import OLMOE, Cli
from tests.huggingface.configs import QWEN3

SEARCHED = ("plan", *OLMOE, "--world-size", "16", "--target", "megatron")
PINS = ("--tp", "2", "--pp", "2", "--ep", "8", "--micro-batch", "1", "--overlap", "none")
CORES = len(os.sched_getaffinity(0))
NOISE = 1.01
"""Plans take a layout that is this near the fastest."""


def step_of(plan: dict[str, Any]) -> float:
    return float(plan["predicted"]["step_seconds"])


def test_the_first_words_are_of_where_the_numbers_come_from(cli: Cli) -> None:
    words = " ".join(cli(*SEARCHED).out.split())
    source = (
        "Numbers: published tables of NVIDIA H100 80GB HBM3, no measurement of yours (profile "
        "h100-x8). Nine in ten public runs of Megatron took"
    )
    assert words.index(source) < words.index("One step:") < words.index("Lay it out")
    for target, model, runs in (
        ("torchtitan", "qwen3-30b-a3b", "Nine in ten public runs of torchtitan took"),
        ("transformers", "olmoe", "Nobody has published steps of transformers"),
    ):
        asked = [model if word == "olmoe" else word for word in SEARCHED]
        assert runs in " ".join(cli(*asked, "--target", target).out.split())
    described = " ".join(cli(*SEARCHED, "--profile", "a100-x4").out.split())
    assert "Numbers: a description of NVIDIA A100 80GB PCIe" in described


@pytest.mark.thorough
def test_a_hint_leads_to_the_step_that_it_promises(cli: Cli) -> None:
    plan = cli(*SEARCHED, *PINS, "--json").document
    limit = plan["inputs"]["memory_limit_bytes"]
    fitting = [saving for saving in plan["savings"] if saving["peak_bytes"] <= limit]
    assert {saving["change"].split()[0] for saving in fitting} >= {"--tp", "--cuda-graphs"}
    for saving in fitting:
        assert saving["change"].startswith("--")
        name, value = saving["change"].split()
        again = cli(*SEARCHED, *PINS, name, value, "--json")
        assert again.code == 0, again.err
        assert step_of(again.document) <= NOISE * saving["step_seconds"]
        assert step_of(again.document) < step_of(plan)


def test_what_pins_cost_is_the_step_of_the_plan_without_them(cli: Cli) -> None:
    pinned, free = cli(*SEARCHED, *PINS, "--json").document, cli(*SEARCHED, "--json").document
    assert pinned["free"]["step_seconds"] == pytest.approx(step_of(free), rel=0.011)
    assert "free" not in free
    ratio = step_of(pinned) / pinned["free"]["step_seconds"]
    words = " ".join(cli(*SEARCHED, *PINS).out.split())
    cost = f"make a step {ratio:.1f} times as long" if ratio >= 2 else f"cost {ratio - 1:.0%}"
    assert f"The pins {cost.replace('%', ' %')}" in words
    assert "no other layout is better" not in words


def test_a_step_without_recomputation_names_the_memory_that_it_lacks(cli: Cli) -> None:
    flags = (*SEARCHED, "--tp", "1", "--pp", "1", "--ep", "1", "--zero", "1", "--micro-batch", "4",
             "--offload-optimizer", "0", "--offload-activations", "0")  # fmt: skip
    plan = cli(*flags, "--json").document
    assert plan["layout"]["recompute"] != ["none"]
    saving = next(saving for saving in plan["savings"] if saving["change"] == "--recompute none")
    assert saving["peak_bytes"] > plan["inputs"]["memory_limit_bytes"]
    refused = cli(*flags, "--recompute", "none", "--json")
    assert refused.code == 3
    needed = refused.document["plan"]["memory"]["peak_bytes"]
    assert needed == pytest.approx(saving["peak_bytes"], rel=1e-6)
    assert "Memory binds, too" in cli(*flags).out


def test_the_parts_of_layouts_are_compared_on_the_mean_of_the_ranks(cli: Cli) -> None:
    sizes = ("--tp", "1", "--ep", "8", "--micro-batch", "1", "--overlap", "none", "--vpp", "1")
    flags = (*SEARCHED, *sizes, "--recompute", "none", "--cuda-graphs", "none")
    first, second = (cli(*flags, "--pp", pp, "--output", f"{pp}.json", "--json").document
                     for pp in ("1", "2"))  # fmt: skip
    mean = second["predicted"]["mean_parts"]
    assert sum(mean.values()) == pytest.approx(step_of(second))
    parts = first["predicted"]["parts"]
    for name in ("head", "experts", "core_attn", "embedding"):  # as much work, on as many ranks
        assert mean[name] == pytest.approx(parts[name]), name
    # The slowest rank has all of the head or none.
    assert second["predicted"]["parts"]["head"] in (0.0, pytest.approx(2 * mean["head"]))
    shown = cli("plans", "diff", "1.json", "2.json", "--json").document["sections"][-1]["tables"]
    compared = {row[0]: row[3] for row in shown[-1]["rows"]}
    assert compared["head"] == pytest.approx(0, abs=1e-9)
    assert compared["step"] == pytest.approx(step_of(second) - step_of(first))
    document = cli("explain", "1.json", "--layout", "pp=2", "--json").document
    assert "head" not in {
        name for name, more in document["difference"]["parts"].items() if abs(more) > 1e-9
    }
    assert sum(document["difference"]["parts"].values()) == pytest.approx(
        document["difference"]["seconds"]
    )


@pytest.mark.thorough
def test_collectives_that_outlast_overlapped_passes_bind_as_sensitivity_says(cli: Cli) -> None:
    flags = ("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--world-size", "64",
             "--global-batch", "64", "--seq", "3072", "--target", "torchtitan", "--ep", "2",
             "--output", "p.json")  # fmt: skip
    words = " ".join(cli(*flags).out.split())
    assert "Collectives of gradients and parameters bind" in words
    assert "more tokens a micro-batch would hide more" in words
    parts = cli("sensitivity", "p.json", "--json").document["parts"]
    assert parts[0]["name"] == "bandwidth of reduce-scatters"
    plan = cli(*flags, "--json").document
    alone, step = plan["predicted"]["parts"]["gradients"], step_of(plan)
    assert alone < 0.1 * step < plan["predicted"]["bound_by_replicas_seconds"]
    roomy = (*flags, "--global-batch", "128", "--memory-limit", "200GiB")
    twice = cli(*roomy, "--micro-batch", "2", "--json").document
    assert step_of(twice) / 2 < 0.97 * step  # of as many tokens
    once = cli(*SEARCHED, "--global-batch", "16", "--zero", "1", "--ep", "2", "--pp", "1",
               "--cuda-graphs", "partial")  # fmt: skip
    assert "more tokens a step would hide more" in " ".join(once.out.split())


@pytest.mark.thorough
def test_graphs_that_recipes_take_are_planned_and_exported(cli: Cli) -> None:
    flags = ("plan", "--model", "gpt-oss-120b", "--profile", "gb200-nvl72", "--world-size", "64",
             "--global-batch", "512", "--seq", "8192", "--target", "bridge", "--dtype", "mxfp8",
             "--output", "p.json")  # fmt: skip
    plan = cli(*flags, "--json").document
    plain = cli(*flags, "--cuda-graphs", "none", "--json").document
    graphs, saved = plan["layout"]["cuda_graphs"], plan["predicted"]["saved_by_graphs_seconds"]
    assert step_of(plan) < 0.95 * step_of(plain)
    assert saved > 0
    assert plan["memory"]["peak_bytes"] <= 0.9 * plan["inputs"]["memory_limit_bytes"]
    words = " ".join(cli(*flags, "--cuda-graphs", "none").out.split())
    assert f"Changed alone, --cuda-graphs {graphs} would save" in words
    assert f"without them it takes {step_of(plan):.2f} s" in words
    words = cli(*flags).out
    assert f"{graphs}: saves" in words
    assert "Changed alone, --cuda-graphs" not in words
    knobs = cli("sensitivity", "p.json", "--json").document["knobs"]
    slower = {knob["knob"]: knob["seconds"] for knob in knobs if knob.get("seconds") is not None}
    assert max(slower.values()) < step_of(plan)  # neighbours have the plan's graphs, too
    assert "cuda_graph_impl = 'full_iteration'" in cli("export", "p.json", "--to", "bridge").out


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("", CORES), ("1", 1), ("0,1", 2), ("0,1,2,3", 2)]
)
def test_devices_are_counted_by_torch(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_devices(visible, tmp_path) == expected
    assert num_devices(None, tmp_path / "none") == CORES


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 0), (1024, 128)])
def test_verify_is_for_here_where_there_is_room(cli: Cli, ranks: int, nodes: int) -> None:
    said = cli(
        "plan", "--d-model", "256", "--d-hidden", "1024", "--num-experts", str(ranks),
        "--tokens", "1k", "--world-size", str(ranks), "--profile", "h100-x8", "--dtype", "bfloat16",
    ).out  # fmt: skip
    here = re.search(r"Verify it on this machine: moetune verify [0-9a-f]{6}\n", said)
    there = re.search(rf"on its {ranks} ranks.*\n.*--nnodes (\d+) --nproc-per-node 8 ", said)
    assert (here is None) == bool(nodes)
    assert int(there[1] if there else 0) == nodes


def test_the_next_steps_of_a_configurations_plan_work_from_any_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    vision = {"model_type": "qwen3_vl_moe", "text_config": QWEN3, "vision_config": {"depth": 27}}
    (folder / "ours.json").write_text(json.dumps(vision), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ("--profile", "h100-x8", "--world-size", "8", "--global-batch", "64", "--seq", "512")
    said = cli("plan", "--model", "configs/ours.json", *asked, "--target", "megatron").out
    assert "Training ours · 8 GPUs" in said
    assert "The vision tower is not counted" in said
    steps = [command.split() for command in re.findall(r"moetune ((?:explain|export) .*)", said)]
    assert [step[0] for step in steps] == ["explain", "export"]
    monkeypatch.chdir("/")
    for step in (*steps, [*steps[0], "--layout", "ep=4"]):
        assert cli(*step).code == 0, step
    moved = folder.rename(tmp_path / "moved") / "ours.json"
    lost = cli(*steps[1])
    assert lost.code == 2
    assert "configs/ours.json" in lost.err.replace("\n", "")
    assert "--model" in lost.err
    assert cli(*steps[1], "--model", str(moved)).code == 0
