"""`moetune explain` with another choice: the plan with that pin, and what refuses it."""

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jsonschema_rs
import pytest

from moetune.solve.joint.uncertainty import OWN_SPREAD
from tests.cli.running import Cli, Planned

XL = ("--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--dtype", "float16")
TRAINING = (
    "--model", "olmoe", "--profile", "h100-x8", "--world-size", "16", "--global-batch", "64",
    "--seq", "4096",
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("asked", "pins"),
    [
        (("--degree", "8"), ("--forward-degree", "8", "--backward-degree", "8")),
        (("--forward-degree", "3"), ("--forward-degree", "3")),
        (("--strategy", "S4"), ("--strategy", "S4")),
        (
            ("--strategy", "S4", "--backward-degree", "2"),
            ("--strategy", "S4", "--backward-degree", "2"),
        ),
    ],
)
def test_a_layers_other_choice_is_the_plan_with_that_pin(
    cli: Cli, planned: Planned, asked: tuple[str, ...], pins: tuple[str, ...]
) -> None:
    plan = planned("plan.json", *XL)
    pinned = cli("plan", *XL, *pins, "--json").document
    found = why(cli, "plan.json", *asked)
    own, other, more = found["chosen"], found["other"], found["difference"]
    assert (found["source"], found["verdict"]) == ("solved", "slower")
    assert own["step_seconds"] == step_of(plan)
    assert other["step_seconds"] == step_of(pinned)
    assert more["seconds"] == pytest.approx(step_of(pinned) - step_of(plan))
    for choice in (own, other):
        assert sum(choice["parts"].values()) == pytest.approx(choice["step_seconds"], rel=1e-9)
    assert sum(more["parts"].values()) == pytest.approx(more["seconds"], rel=1e-9)
    assert other["needed_bytes"] == pinned["memory"]["peak_bytes"] <= found["limit_bytes"]
    assert 0 <= found["probability_faster"] < 0.5


def test_rules_refuse_and_name_the_nearest(cli: Cli, planned: Planned) -> None:
    cli("plan", *XL, "--output", "plan.json", "--max-degree", "16")
    found = why(cli, "plan.json", "--degree", "32")
    assert (found["verdict"], found["other"], found["difference"]) == ("refused", None, None)
    assert "max_degree is 16" in found["refused"]["what"]
    assert "nearest: --forward-degree 16" in found["refused"]["hint"]
    planned("training.json", *TRAINING)
    found = why(cli, "training.json", "--layout", "tp=3")
    assert "num_heads (16) does not divide by tp (3)" in found["refused"]["what"]
    assert cli("explain", "training.json", "--layout", "tp=3").out.startswith("It cannot be had: ")


def test_what_does_not_fit_says_what_it_would_take(cli: Cli) -> None:
    limit = ("--memory-limit", "900MiB")
    plan = cli("plan", *XL, *limit, "--json", "--output", "plan.json").document
    roomy = cli("plan", *XL, "--strategy", "none", "--degree", "8", "--json")
    assert roomy.code == 2  # a plan has no such flag
    roomy_plan = cli(
        "plan", *XL, "--strategy", "none", "--forward-degree", "8", "--backward-degree", "8",
        "--json",
    ).document  # fmt: skip
    found = why(cli, "plan.json", "--strategy", "none", "--degree", "8")
    assert found["verdict"] == "too_large"
    assert found["other"]["step_seconds"] == step_of(roomy_plan)
    assert found["other"]["needed_bytes"] > found["limit_bytes"] == 900 * 2**20
    assert "memory binds" in found["refused"]["what"]
    assert plan["memory"]["strategy"] != "none"
    assert found["words"][0].startswith("It does not fit: ")


def test_kept_candidates_are_answered_without_the_profile(cli: Cli, tmp_path: Path) -> None:
    cli("profiles", "export", "rtx2080ti-x64", "--output", str(tmp_path / "mine.toml"))
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("rtx2080ti-x64", "mine"), encoding="utf-8")
    flags = ("--model", "gpt-xl", "--profile", str(tmp_path / "mine.toml"), "--dtype", "float16")
    plan = cli("plan", *flags, "--json", "--output", "plan.json").document
    kept = plan["alternatives"][0]
    asked = (
        "--forward-degree", str(kept["forward_degree"]), "--backward-degree",
        str(kept["backward_degree"]),
    )  # fmt: skip
    found = why(cli, "plan.json", *asked)
    assert (found["source"], found["limit_bytes"]) == ("plan", None)
    assert found["other"]["step_seconds"] == kept["step_seconds"]
    assert found["kept_because"] == kept["lost_because"]
    assert "is not here" in found["notes"][0]
    solved = why(cli, "plan.json", *asked, "--profile", str(tmp_path / "mine.toml"))
    assert solved["source"] == "solved"
    assert solved["other"]["step_seconds"] == kept["step_seconds"]
    assert why(cli, "plan.json", "--strategy", "S4")["kept_because"] != ""
    own = why(cli, "plan.json", "--forward-degree", str(plan["pipeline"]["forward_degree"]))
    assert own["verdict"] == "chosen"
    missing = cli("explain", "plan.json", "--degree", "61", "--json")
    assert missing.code == 5
    assert "mine" in missing.document["error"]
    assert missing.document["hint"]


def test_a_training_plans_other_layout_is_the_plan_with_those_pins(
    cli: Cli, planned: Planned
) -> None:
    flags = (*TRAINING, "--target", "megatron")
    plan = planned("plan.json", *flags)
    pinned = cli("plan", *flags, "--tp", "2", "--ep", "4", "--json").document
    found = why(cli, "plan.json", "--layout", "tp=2,ep=4")
    own, other = (one["predicted"]["step_seconds"] for one in (plan, pinned))
    assert found["chosen"]["step_seconds"] == own
    assert found["other"]["step_seconds"] == other
    assert found["other"]["needed_bytes"] == pinned["memory"]["peak_bytes"]
    assert sum(found["difference"]["parts"].values()) == pytest.approx(other - own, rel=1e-6)
    # Two errors of 5 % each, independent: their difference has √2 times that.
    chance = NormalDist().cdf(math.log(own / other) / (OWN_SPREAD * math.sqrt(2)))
    assert found["probability_faster"] == pytest.approx(chance, abs=2e-3)
    refused = why(cli, "plan.json", "--layout", "tp=3")
    assert (refused["verdict"], refused["other"]) == ("refused", None)


def test_a_training_layout_that_does_not_fit_is_priced_all_the_same(cli: Cli) -> None:
    on_device = ("--zero", "1", "--offload-optimizer", "0", "--offload-activations", "0")
    flags = ("plan", *TRAINING, "--target", "megatron", "--memory-limit", "40GiB", *on_device)
    cli(*flags, "--output", "plan.json")
    pins = ("--tp", "1", "--pp", "1", "--ep", "1")
    refused = cli(*flags, *pins, "--json")
    assert refused.code == 3
    found = why(cli, "plan.json", "--layout", "tp=1,pp=1,ep=1")
    smallest = refused.document["plan"]
    assert found["verdict"] == "too_large"
    assert found["refused"]["what"] == "the plan's own --zero 1 leaves no room for it"
    without = ("plan", *TRAINING, "--target", "megatron", "--memory-limit", "40GiB", *on_device[2:])
    freed = cli(*without, *pins, "--json").document
    assert freed["fits"]
    assert f"{freed['layout']['dp']} · micro-batch" in found["refused"]["hint"]
    assert found["other"]["step_seconds"] == smallest["predicted"]["step_seconds"]
    assert found["other"]["needed_bytes"] > found["limit_bytes"] == 40 * 2**30
    everywhere = why(cli, "plan.json", "--layout", "tp=1,pp=1,ep=1,zero=1,micro-batch=4")
    assert everywhere["verdict"] == "too_large"


def test_a_layout_without_room_for_any_pins_names_the_memory(cli: Cli) -> None:
    flags = ("plan", *TRAINING, "--target", "megatron", "--memory-limit", "20GiB")
    cli(*flags, "--output", "plan.json")
    asked = "tp=1,pp=1,ep=1,zero=1,offload-optimizer=0,offload-activations=0"
    found = why(cli, "plan.json", "--layout", asked)
    assert found["verdict"] == "too_large"
    assert found["refused"]["what"].startswith("memory binds: ")


def test_a_layout_that_the_runtime_refuses_is_no_matter_of_memory(cli: Cli) -> None:
    """The 96 heads of glm-4.5-air divide by tp 3, and its 8 key heads do not."""
    cli(
        "plan", "--model", "glm-4.5-air", "--profile", "h100-x8", "--world-size", "48",
        "--global-batch", "96", "--seq", "6144", "--target", "megatron", "--output", "plan.json",
    )  # fmt: skip
    found = why(cli, "plan.json", "--layout", "tp=3")
    assert (found["verdict"], found["other"]) == ("refused", None)
    assert "tp 3" in found["refused"]["what"]
    assert "as pinned a step would take" in found["refused"]["hint"]
    assert found["words"][0].startswith("It cannot be had: megatron ")
    assert not any("memory" in words for words in found["words"])


def test_lists_of_modules_and_shares_of_the_host_are_asked_for(cli: Cli) -> None:
    flags = ("plan", *TRAINING, "--target", "megatron")
    cli(*flags, "--output", "plan.json")
    found = why(cli, "plan.json", "--layout", "recompute=norm,moe_act,offload-optimizer=0.5")
    same = cli(*flags, "--recompute", "norm,moe_act", "--offload-optimizer", "0.5", "--json")
    assert found["other"]["decision"]["recompute"] == "moe_act,norm"
    assert found["other"]["step_seconds"] == step_of_training(same.document)
    waiting = why(cli, "plan.json", "--layout", "offload-activations=0.25")
    assert waiting["other"]["decision"]["offload-activations"] == "0.25"
    for wrong in ("offload-optimizer=2", "offload-optimizer=x", "recompute=norms", "tp=1,tp=2"):
        assert cli("explain", "plan.json", "--layout", wrong).code == 2


def step_of_training(plan: dict[str, Any]) -> float:
    return float(plan["predicted"]["step_seconds"])


def test_a_printed_layout_has_sizes_of_one_where_it_names_none(cli: Cli, planned: Planned) -> None:
    plan = planned("plan.json", *TRAINING, "--target", "megatron")
    kept = plan["alternatives"][0]
    names = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = [(one, kept["layout"][one]) for one in names if kept["layout"][one] > 1]
    text = " · ".join(f"{name} {size}" for name, size in sizes)
    text += f" · micro-batch {kept['layout']['micro_batch']}"
    found = why(cli, "plan.json", "--layout", text)
    assert found["other"]["decision"]["tp"] == str(kept["layout"]["tp"])
    assert found["other"]["step_seconds"] == pytest.approx(
        kept["predicted"]["step_seconds"], rel=0.011
    )


def test_chunks_of_a_training_plan_are_priced_in_its_layout(cli: Cli) -> None:
    flags = ("plan", *TRAINING, "--overlap", "chunks", "--ep", "16", "--output", "plan.json")
    plan = cli(*flags, "--json").document
    degree = plan["layout"]["degree"]
    same = why(
        cli, "plan.json", "--forward-degree", str(degree["forward"]), "--backward-degree",
        str(degree["backward"]),
    )  # fmt: skip
    assert same["verdict"] == "chosen"
    assert same["other"]["step_seconds"] == pytest.approx(same["chosen"]["step_seconds"], rel=1e-9)
    ahead = why(cli, "plan.json", "--forward-degree", str(degree["forward"]))
    assert ahead["asked"]["backward-degree"] == str(degree["backward"])
    assert ahead["verdict"] == "chosen"
    found = why(cli, "plan.json", "--degree", "1")
    assert found["verdict"] == "slower"
    # In one chunk nothing is hidden, which is what the plan says that its overlap saves.
    assert found["difference"]["seconds"] == pytest.approx(
        plan["predicted"]["saved_by_overlap_seconds"], rel=0.05
    )


def test_a_kept_layout_of_training_needs_no_profile(cli: Cli, tmp_path: Path) -> None:
    cli("profiles", "export", "h100-x8", "--output", str(tmp_path / "mine.toml"))
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    text = text.replace('name = "h100-x8"', 'name = "mine"')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    flags = [*TRAINING]
    flags[3] = str(tmp_path / "mine.toml")
    plan = cli("plan", *flags, "--target", "megatron", "--json", "--output", "p.json").document
    layout = plan["alternatives"][0]["layout"]
    asked = ",".join(f"{one}={layout[one]}" for one in ("tp", "pp", "ep", "micro_batch"))
    found = why(cli, "p.json", "--layout", asked)
    assert found["source"] == "plan"
    assert found["other"]["step_seconds"] == min(
        one["predicted"]["step_seconds"]
        for one in (plan, *plan["alternatives"])
        if all(one["layout"][name] == layout[name] for name in ("tp", "pp", "ep", "micro_batch"))
    )
    assert cli("explain", "p.json", "--layout", "tp=8,pp=2", "--json").code == 5
    assert cli("explain", "p.json", "--degree", "2", "--json").code == 5


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("plan.json", "--degree", "4", "--backward-degree", "2"), "exclude each other"),
        (("plan.json", "--degree", "999"), "--degree must be from 1 to 256"),
        (("training.json", "--degree", "17"), "--degree must be from 1 to 16"),
        (("plan.json", "--layout", "tp=2"), "--layout is for whole models"),
        (("training.json", "--layout", "pq=1"), "unknown key 'pq'"),
        (("training.json", "--strategy", "S1"), "--strategy is for layers"),
        (("training.json", "--degree", "4"), "not in chunks"),
        (("training.json", "--degree", "4", "--layout", "tp=1"), "exclude each other"),
        (("training.json", "--layout", "dp=2"), "dp follows from"),
        (("training.json", "--layout", "dp 3 · tp 2"), "is not the 16 ranks"),
    ],
)
def test_wrong_values_name_the_flag(
    cli: Cli, planned: Planned, arguments: tuple[str, ...], part: str
) -> None:
    files = {
        "plan.json": XL, "training.json": (*TRAINING, "--target", "megatron"),
    }  # fmt: skip
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
    found = why(cli, "old.json", "--degree", "4")
    assert "make the plan again" in found["notes"][0]
    faster = found["verdict"] == "faster"
    assert faster == (found["difference"]["seconds"] < 0)
    assert any("are not taken" in one for one in found["words"]) == faster
