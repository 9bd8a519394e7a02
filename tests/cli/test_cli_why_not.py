"""`moetune explain` with another choice: the plan with that pin, and what refuses it."""

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jsonschema_rs
import pytest

from moetune.solve.model.uncertainty import LAYOUT_SPREAD
from tests.cli.running import OLMOE, XL, Cli, Planned

TRAINING = (*OLMOE, "--world-size", "16")
MEGATRON = (*TRAINING, "--target", "megatron")
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "why-not.json"


def why(cli: Cli, *arguments: str) -> dict[str, Any]:
    """Return the document of an answer, which follows its schema."""
    result = cli("explain", *arguments, "--json")
    assert result.code == 0, result.out + result.err
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema_rs.validator_for(schema).validate(result.document)
    return result.document


def step_of(plan: dict[str, Any]) -> float:
    return float(plan["predicted"]["step_seconds"])


@pytest.mark.parametrize(("flags", "asked", "pins"), [
    (XL, ("--degree", "8"), ("--forward-degree", "8", "--backward-degree", "8")),
    (XL, ("--strategy", "S4", "--degree", "2"),
     ("--strategy", "S4", "--forward-degree", "2", "--backward-degree", "2")),
    (MEGATRON, ("--layout", "tp=2,ep=4"), ("--tp", "2", "--ep", "4")),
    (MEGATRON, ("--layout", "recompute=norm,moe_act,offload-optimizer=0.5"),
     ("--recompute", "norm,moe_act", "--offload-optimizer", "0.5")),
])  # fmt: skip
def test_another_choice_is_the_plan_with_that_pin(
    cli: Cli, planned: Planned, flags: tuple[str, ...], asked: tuple[str, ...],
    pins: tuple[str, ...],
) -> None:  # fmt: skip
    plan = planned("plan.json", *flags)
    pinned = cli("plan", *flags, *pins, "--json").document
    answer = why(cli, "plan.json", *asked)
    chosen, other, more = answer["chosen"], answer["other"], answer["difference"]
    assert (answer["source"], answer["verdict"]) == ("solved", "slower")
    assert chosen["step_seconds"] == step_of(plan)
    assert other["step_seconds"] == step_of(pinned)
    assert more["seconds"] == pytest.approx(step_of(pinned) - step_of(plan))
    for choice in (chosen, other):
        assert sum(choice["parts"].values()) == pytest.approx(choice["step_seconds"], rel=1e-6)
    assert sum(more["parts"].values()) == pytest.approx(more["seconds"], rel=1e-6)
    assert other["needed_bytes"] == pinned["memory"]["peak_bytes"] <= answer["limit_bytes"]
    assert 0 <= answer["probability_faster"] < 0.5
    if flags == MEGATRON:
        # Two errors of 5 % each, independent: their difference has √2 times that.
        ratio = math.log(step_of(plan) / step_of(pinned))
        chance = NormalDist().cdf(ratio / (LAYOUT_SPREAD * math.sqrt(2)))
        assert answer["probability_faster"] == pytest.approx(chance, abs=2e-3)


def test_rules_refuse_and_name_the_nearest(cli: Cli, planned: Planned) -> None:
    cli("plan", *XL, "--output", "plan.json", "--max-degree", "16")
    answer = why(cli, "plan.json", "--degree", "32")
    assert (answer["verdict"], answer["other"], answer["difference"]) == ("refused", None, None)
    assert "max_degree is 16" in answer["refused"]["what"]
    assert "nearest: --forward-degree 16" in answer["refused"]["hint"]
    planned("training.json", *MEGATRON)
    answer = why(cli, "training.json", "--layout", "tp=3")
    assert "num_heads (16) does not divide by tp (3)" in answer["refused"]["what"]
    assert cli("explain", "training.json", "--layout", "tp=3").out.startswith("It is impossible: ")


def test_what_does_not_fit_says_what_it_would_take(cli: Cli) -> None:
    limit = ("--memory-limit", "900MiB")
    plan = cli("plan", *XL, *limit, "--json", "--output", "plan.json").document
    roomy = cli("plan", *XL, "--strategy", "none", "--degree", "8", "--json")
    assert roomy.code == 2  # a plan has no such flag
    roomy_plan = cli("plan", *XL, "--strategy", "none", "--forward-degree", "8",
                     "--backward-degree", "8", "--json").document  # fmt: skip
    answer = why(cli, "plan.json", "--strategy", "none", "--degree", "8")
    assert answer["verdict"] == "too_large"
    assert answer["other"]["step_seconds"] == step_of(roomy_plan)
    assert answer["other"]["needed_bytes"] > answer["limit_bytes"] == 900 * 2**20
    assert "memory binds" in answer["refused"]["what"]
    assert plan["memory"]["strategy"] != "none"
    assert answer["words"][0].startswith("It does not fit: ")


def test_a_training_layout_that_does_not_fit_is_priced_all_the_same(cli: Cli) -> None:
    on_device = ("--zero", "1", "--offload-optimizer", "0", "--offload-activations", "0")
    flags = ("plan", *TRAINING, "--target", "megatron", "--memory-limit", "40GiB", *on_device)
    cli(*flags, "--output", "plan.json")
    pins = ("--tp", "1", "--pp", "1", "--ep", "1")
    refused = cli(*flags, *pins, "--json")
    assert refused.code == 3
    answer = why(cli, "plan.json", "--layout", "tp=1,pp=1,ep=1")
    smallest = refused.document["plan"]
    assert answer["verdict"] == "too_large"
    assert answer["refused"]["what"] == "the plan's --zero 1 leaves no room for it"
    without = ("plan", *TRAINING, "--target", "megatron", "--memory-limit", "40GiB", *on_device[2:])
    freed = cli(*without, *pins, "--json").document
    assert freed["fits"]
    assert f"{freed['layout']['dp']} · micro-batch" in answer["refused"]["hint"]
    assert answer["other"]["step_seconds"] == smallest["predicted"]["step_seconds"]
    assert answer["other"]["needed_bytes"] > answer["limit_bytes"] == 40 * 2**30
    offloads = "offload-optimizer=0,offload-activations=0"
    pinned = why(cli, "plan.json", "--layout", f"tp=1,pp=1,ep=1,zero=1,micro-batch=4,{offloads}")
    assert pinned["verdict"] == "too_large"
    assert pinned["refused"]["what"].startswith("memory binds: ")


@pytest.mark.thorough
def test_a_layout_that_the_runtime_refuses_is_no_matter_of_memory(cli: Cli) -> None:
    """The 96 heads of glm-4.5-air divide by tp 3, and its 8 key heads do not."""
    cli(
        "plan", "--model", "glm-4.5-air", "--profile", "h100-x8", "--world-size", "48",
        "--global-batch", "96", "--seq", "6144", "--target", "megatron", "--output", "plan.json",
    )  # fmt: skip
    answer = why(cli, "plan.json", "--layout", "tp=3")
    assert (answer["verdict"], answer["other"]) == ("refused", None)
    assert "tp 3" in answer["refused"]["what"]
    assert "as pinned a step would take" in answer["refused"]["hint"]
    assert answer["words"][0].startswith("It is impossible: megatron ")
    assert not any("memory" in words for words in answer["words"])


def test_a_printed_layout_has_sizes_of_one_where_it_names_none(cli: Cli, planned: Planned) -> None:
    plan = planned("plan.json", *MEGATRON)
    kept = plan["alternatives"][0]
    names = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = [(name, kept["layout"][name]) for name in names if kept["layout"][name] > 1]
    text = " · ".join(f"{name} {size}" for name, size in sizes)
    text += f" · micro-batch {kept['layout']['micro_batch']}"
    answer = why(cli, "plan.json", "--layout", text)
    assert answer["other"]["decision"]["tp"] == str(kept["layout"]["tp"])
    assert answer["other"]["step_seconds"] == pytest.approx(
        kept["predicted"]["step_seconds"], rel=0.011
    )


def test_chunks_of_a_training_plan_are_priced_in_its_layout(cli: Cli) -> None:
    flags = ("plan", *TRAINING, "--overlap", "chunks", "--ep", "16", "--output", "plan.json")
    plan = cli(*flags, "--json").document
    degree = plan["layout"]["degree"]
    same = why(cli, "plan.json", "--degree", str(degree["forward"]))
    assert same["asked"]["backward-degree"] == str(degree["backward"])
    assert same["verdict"] == "chosen"
    assert same["other"]["step_seconds"] == pytest.approx(same["chosen"]["step_seconds"], rel=1e-9)
    answer = why(cli, "plan.json", "--degree", "1")
    assert answer["verdict"] == "slower"
    # In one chunk nothing is hidden, which is what the plan says that its overlap saves.
    assert answer["difference"]["seconds"] == pytest.approx(
        plan["predicted"]["saved_by_overlap_seconds"], rel=0.05
    )


def asked_of(kept: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags that ask for a choice that a plan has kept."""
    if "layout" in kept:
        names = ("tp", "pp", "ep", "micro_batch")
        return "--layout", ",".join(f"{name}={kept['layout'][name]}" for name in names)
    return "--degree", str(kept["forward_degree"])


@pytest.mark.parametrize(
    ("flags", "profile", "missing"),
    [(XL, "rtx2080ti-x64", ("--degree", "61")), (MEGATRON, "h100-x8", ("--layout", "tp=8,pp=2"))],
)
def test_kept_candidates_are_answered_without_the_profile(
    cli: Cli, flags: tuple[str, ...], profile: str, missing: tuple[str, ...]
) -> None:
    file = Path("mine.toml").absolute()
    cli("profiles", "export", profile, "--output", str(file))
    text = file.read_text(encoding="utf-8").replace(f'"{profile}"', '"mine"')
    file.write_text(text, encoding="utf-8")
    renamed = [str(file) if flag == profile else flag for flag in flags]
    plan = cli("plan", *renamed, "--json", "--output", "plan.json").document
    asked = asked_of(plan["alternatives"][0])
    same = [row for row in plan["alternatives"] if asked_of(row) == asked]
    answer = why(cli, "plan.json", *asked)
    assert answer["source"] == "plan"
    assert answer["other"]["step_seconds"] == min(
        row.get("step_seconds") or step_of(row) for row in same
    )
    assert answer["kept_because"] == plan["alternatives"][0].get("lost_because", "")
    assert "is not here" in answer["notes"][0]
    assert why(cli, "plan.json", *asked, "--profile", str(file))["source"] == "solved"
    refused = cli("explain", "plan.json", *missing, "--json")
    assert refused.code == 5
    assert "mine" in refused.document["error"]
    assert refused.document["hint"]


def test_the_choice_of_a_plan_is_said_to_be_it(cli: Cli, planned: Planned) -> None:
    plan = planned("plan.json", *XL)
    degree = str(plan["pipeline"]["forward_degree"])
    assert why(cli, "plan.json", "--degree", degree)["verdict"] == "chosen"
    assert why(cli, "plan.json", "--strategy", "S4")["kept_because"] != ""


@pytest.mark.parametrize(("arguments", "part"), [
    (("plan.json", "--degree", "999"), "--degree must be from 1 to 256"),
    (("training.json", "--degree", "17"), "--degree must be from 1 to 16"),
    (("plan.json", "--layout", "tp=2"), "--layout is for whole models"),
    (("training.json", "--layout", "pq=1"), "--layout has no 'pq'"),
    (("training.json", "--layout", "offload-optimizer=2"), "must be from 0 to 1"),
    (("training.json", "--layout", "offload-optimizer=x"), "is no number"),
    (("training.json", "--layout", "recompute=norms"), "norms is no module"),
    (("training.json", "--layout", "tp=1,tp=2"), "names tp twice"),
    (("training.json", "--strategy", "S1"), "--strategy is for layers"),
    (("training.json", "--degree", "4"), "not in chunks"),
    (("training.json", "--degree", "4", "--layout", "tp=1"), "exclude each other"),
    (("training.json", "--layout", "dp=2"), "dp follows from"),
    (("training.json", "--layout", "dp 3 · tp 2"), "is not the 16 ranks"),
])  # fmt: skip
def test_wrong_values(cli: Cli, planned: Planned, arguments: tuple[str, ...], part: str) -> None:
    files = {"plan.json": XL, "training.json": MEGATRON}
    if arguments[0] in files:
        planned(arguments[0], *files[arguments[0]])
    result = cli("explain", *arguments, "--json")
    assert (result.code, result.document["exit_code"]) == (2, 2)
    assert part in result.document["error"]


def test_a_drifted_version_says_so(cli: Cli, planned: Planned) -> None:
    planned("plan.json", *XL)
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    document["predicted"]["step_seconds"] *= 1.5
    Path("old.json").write_text(json.dumps(document), encoding="utf-8")
    answer = why(cli, "old.json", "--degree", "4")
    assert "make the plan again" in answer["notes"][0]
    faster = answer["verdict"] == "faster"
    assert faster == (answer["difference"]["seconds"] < 0)
    assert any("are not taken" in line for line in answer["words"]) == faster
