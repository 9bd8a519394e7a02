"""Plans of whole models by a record of each layer's routing: placed experts, and what refuses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.placement import check_order
from moetune.domain.routing_record import ModelRoutingRecord, RoutingRecord
from tests.cli.running import OLMOE, Cli

LAYERS, EXPERTS, TOP_K = 16, 64, 8
PLAN = ("plan", *OLMOE, "--world-size", "8", "--tp", "1", "--cp", "1", "--pp", "1", "--ep", "8")


def record(loads: list[int], *, top_k: int = TOP_K) -> RoutingRecord:
    return RoutingRecord(num_experts=len(loads), top_k=top_k, num_ranks=1, num_steps=10,
                         loads=tuple(loads), fullest_p50=1.0, fullest_p99=1.0)  # fmt: skip


def uneven(seed: int) -> list[int]:
    """Return loads of which none is more than a token may give one expert."""
    drawn = random.Random(seed)
    return [1 + round(1000 * drawn.random() ** 3) for _ in range(EXPERTS)]


def written(folder: Path, layers: list[RoutingRecord], name: str = "routing.json") -> str:
    (folder / name).write_text(ModelRoutingRecord(layers=tuple(layers)).text)
    return str(folder / name)


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request.getfixturevalue("cli")  # which sets a folder
    monkeypatch.chdir(tmp_path)  # plans name the file of their routing


@pytest.fixture
def routing(tmp_path: Path) -> str:
    return written(tmp_path, [record(uneven(seed)) for seed in range(LAYERS)])


def planned(cli: Cli, routing: str, *flags: str) -> Any:
    result = cli(*PLAN, *flags, "--routing", routing, "--json", "--output", "plan.json")
    assert result.code == 0, result.err
    return result.document


def rows_of_fullest(loads: list[int], order: list[int], ranks: int) -> float:
    each = len(order) // ranks
    sums = [sum(loads[e] for e in order[at : at + each]) for at in range(0, len(order), each)]
    return max(sums) / sum(sums) * ranks


def test_each_layers_experts_are_placed_and_the_step_is_shorter(cli: Cli, routing: str) -> None:
    plan = planned(cli, routing)
    placement = plan["placement"]
    assert len(placement["layers"]) == LAYERS
    for seed, layer in enumerate(placement["layers"]):
        loads = uneven(seed)
        check_order(layer["experts"], EXPERTS)
        placed = rows_of_fullest(loads, layer["experts"], 8)
        assert layer["placed_skew"] == pytest.approx(placed)
        assert layer["natural_skew"] == pytest.approx(rows_of_fullest(loads, [*range(EXPERTS)], 8))
        assert 0.999999 <= layer["least_skew"] <= placed + 1e-9
        assert placed <= 1.05 < layer["natural_skew"]
    natural = planned(cli, routing, "--expert-placement", "natural")
    balanced = cli(*PLAN, "--json").document
    assert placement["natural_step_seconds"] == natural["predicted"]["step_seconds"]
    assert placement["placed_step_seconds"] == plan["predicted"]["step_seconds"]
    steps = [document["predicted"]["step_seconds"] for document in (balanced, plan, natural)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    assert steps[1] < 0.98 * steps[2]
    assert not any(layer["experts"] for layer in natural["placement"]["layers"])
    assert "placement" not in balanced
    assert len({plan["id"], natural["id"], balanced["id"]}) == 3


def test_the_id_covers_every_layers_loads(cli: Cli, routing: str, tmp_path: Path) -> None:
    first = planned(cli, routing)["id"]
    layers = [record(uneven(seed)) for seed in range(LAYERS)]
    assert planned(cli, written(tmp_path, layers))["id"] == first
    layers[7] = record(uneven(99))
    assert planned(cli, written(tmp_path, layers))["id"] != first


def test_equal_records_are_the_natural_order_of_all_layers(cli: Cli, tmp_path: Path) -> None:
    """Even loads are a plan without routing, whose file is of each layer or of one."""
    even = planned(cli, written(tmp_path, [record([5] * EXPERTS)] * LAYERS))
    balanced = cli(*PLAN, "--json").document
    assert even["predicted"]["step_seconds"] == pytest.approx(balanced["predicted"]["step_seconds"])
    assert "placed ones save 0.0 %" in even["placement"]["why"]
    (tmp_path / "one.json").write_text(record([5] * EXPERTS).text)
    single = planned(cli, "one.json")
    assert "placement" not in single
    assert single["predicted"] == balanced["predicted"]


@pytest.mark.thorough
def test_a_plan_that_is_read_back_has_the_same_numbers(cli: Cli, routing: str) -> None:
    plan = planned(cli, routing, "--overlap", "chunks")
    step = plan["predicted"]["step_seconds"]
    assert cli("trace", "plan.json", "--output", "trace.json").code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert max(bar["ts"] + bar["dur"] for bar in bars) / 1e6 == pytest.approx(step, rel=1e-9)
    assert cli("sensitivity", "plan.json", "--json").document["step_seconds"] == step
    other = cli("explain", "plan.json", "--layout", "ep=4", "--json").document
    assert other["chosen"]["step_seconds"] == step
    assert not [note for note in other["notes"] if "predicts" in note]
    degree = cli("explain", "plan.json", "--degree", "1", "--json").document
    assert degree["other"]["step_seconds"] >= step


def test_what_cannot_place_says_so(cli: Cli, routing: str) -> None:
    for flags, words in (
        (("--zero", "3"), "with ZeRO stage 3 their shards are in the order of the ranks"),
        (("--expert-placement", "natural"), "as pinned; the fullest ranks have"),
        (("--target", "megatron"), "megatron places none, and --target moetune does: the fullest"),
        (("--target", "megatron", "--ep", "1"), "would save less than the predictions' error"),
    ):
        plan = planned(cli, routing, *flags)
        assert words in plan["placement"]["why"]
        assert not any(layer["experts"] for layer in plan["placement"]["layers"])
    moved = planned(cli, routing, "--target", "megatron")["placement"]
    assert moved["placed_step_seconds"] < 0.98 * moved["natural_step_seconds"]
    exported = planned(cli, routing) and cli("export", "plan.json", "--to", "moetune").out
    assert "moetune.parallelize does and this export" in exported


def test_what_does_not_fit_in_the_natural_order_is_placed(cli: Cli, tmp_path: Path) -> None:
    hot = [record([2000] * 8 + [1000] * 56)] * LAYERS
    file = written(tmp_path, hot, "hot.json")
    pins = ("--recompute", "none", "--micro-batch", "2", "--overlap", "none", "--zero", "1")
    natural, placed = (
        planned(cli, file, *pins, *more)["memory"]["peak_bytes"]
        for more in (("--expert-placement", "natural"), ())
    )
    assert placed < natural
    limit = ("--memory-limit", f"{(placed + natural) // 2}B")
    assert cli(*PLAN, *pins, *limit, "--routing", file, "--expert-placement", "natural").code == 3
    placement = planned(cli, file, *pins, *limit)["placement"]
    assert placement["natural_step_seconds"] is None
    assert placement["why"].startswith("in their order they do not fit")
    assert all(layer["experts"] for layer in placement["layers"])
    too_small = ("--memory-limit", f"{placed // 2}B")
    assert cli(*PLAN, *pins, *too_small, "--routing", file).code == 3


def test_records_of_other_models_and_rules_without_a_record_are_refused(
    cli: Cli, routing: str, tmp_path: Path
) -> None:
    good = [record(uneven(seed)) for seed in range(LAYERS)]
    odd = [*good[:-1], record([1] * 32, top_k=2)]
    for layers, words in (
        (good[:4], "is the record of 4 layers with 64 experts and top_k 8, and allenai/OLMoE"),
        (odd, "15 layers with 64 experts and top_k 8, 1 layer with 32 experts and top_k 2, and"),
    ):
        result = cli(*PLAN, "--routing", written(tmp_path, layers, "other.json"))
        assert result.code == 2
        assert words.replace("allenai/OLMoE", "olmoe") in " ".join(result.err.split())
        assert "has 16 layers with 64 experts and top_k 8" in " ".join(result.err.split())
    layer = ("plan", "--d-model", "64", "--d-hidden", "64", "--num-experts", "64", "--tokens", "4k")
    result = cli(*layer, "--profile", "h100-x8", "--routing", routing)
    assert "the record of a model's 16 layers, and this plan is for one layer" in result.err
    for flags, words in (
        (("--expert-placement", "natural"), "natural needs loads of each layer's experts"),
        (("--expert-placement", "planned", "--routing", "natural"), "planned needs loads"),
        (
            ("--expert-placement", "planned", "--routing", routing, "--target", "megatron"),
            "planned: megatron keeps experts in the model's order",
        ),
    ):
        result = cli(*PLAN, *flags)
        assert result.code == 2
        assert words in result.err


def test_people_read_where_experts_are_and_why(cli: Cli, routing: str) -> None:
    planned(cli, routing)
    said = " ".join(cli(*PLAN, "--routing", routing).out.split())
    assert "Experts are placed by their loads: the fullest ranks have 1.0" in said
    explained = cli("explain", "plan.json")
    words = " ".join(explained.out.split())
    assert "the mean of 16 layers, instead of" in words
    assert "layer of experts model's order placed at least" in words
    document = cli("explain", "plan.json", "--json").document
    assert document["placement"] == planned(cli, routing)["placement"]
    even = cli(*PLAN, "--output", "even.json")
    assert "placed" not in even.out
    assert "placement" not in cli("explain", "even.json", "--json").document
    hot, flat = "plan.json", "even.json"
    assert "placed by their loads instead of in their order" in cli("plans", "diff", flat, hot).out
    assert "in their order instead of placed by their loads" in cli("plans", "diff", hot, flat).out
