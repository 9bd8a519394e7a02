"""Documents of before: what was measured in vain is left out, and what does not run is named."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.any_plan import plan_from_document
from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.placement import ModelPlacement, PlacementChoice
from moetune.domain.plan import Alternative, Plan
from moetune.domain.profile import CollectiveLine, Profile, profile_from_document
from moetune.domain.samples import CollectivePoint, GemmPoint, RowsPoint, Sample, StepPoint
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.domain.training_document import TrainingInputs, TrainingStep
from moetune.domain.withdrawn import without_unread_points
from tests.report.lab import lab_profile
from tests.runtime.plans import small_plan
from tests.training_plans import TRAINING

LAYER = LayerShape(d_model=8, d_hidden=16, num_experts=4)
WITHDRAWN = "was withdrawn on 2026-11-28"


@pytest.mark.parametrize(("part", "key", "value", "what"), [
    ("pipeline", "dispatcher", "hierarchical", "plan.pipeline has 'dispatcher': "),
    ("inputs", "constraints", {"quantization": "fp8_rowwise"},
     "has 'quantization': experts in 8 bits"),
    ("inputs", "constraints", {"sequence-parallel": "true"},
     "has 'sequence-parallel': shards of the tokens"),
])  # fmt: skip
def test_a_withdrawn_plan_is_refused_by_name(part: str, key: str, value: object, what: str) -> None:
    document = encode(small_plan(layer=LAYER))
    document[part][key] = value
    with pytest.raises(InputError, match=f"{what}.*{WITHDRAWN}"):
        plan_from_document(document)


@pytest.mark.parametrize(("key", "value"), [
    ("schedule", "zero_bubble"), ("recompute", ["moe"]), ("etp", 2), ("cp", 2), ("tp", 2),
])  # fmt: skip
def test_what_moetunes_runtime_no_longer_runs_is_refused_by_name(key: str, value: object) -> None:
    layout = TRAINING["layout"] | {"tp": 1, "dp": 8, "overlap": "none"}
    plan = TRAINING | {"inputs": TRAINING["inputs"] | {"target": "moetune"}, "layout": layout}
    assert plan_from_document(plan).kind == "training"
    with pytest.raises(InputError, match=rf"plan has '{key}': .*{WITHDRAWN}") as caught:
        plan_from_document(plan | {"layout": layout | {key: value}})
    assert f"--{key} " in str(caught.value.hint)


def test_a_plan_that_pinned_flat_exchanges_is_read() -> None:
    plan = small_plan(layer=LAYER, constraints={"dispatcher": "flat"})
    assert plan_from_document(encode(plan)) == plan


def test_a_layout_with_it_is_refused_by_name() -> None:
    sizes = dict.fromkeys(("dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch"), 1)
    layout = {**sizes, "recompute": [], "dispatcher": "all_to_all", "overlap": "none", "zero": 0}
    assert decode(FoldedLayout, layout, "layout").dispatcher == "all_to_all"
    with pytest.raises(InputError, match=f"layout.dispatcher has 'hierarchical': .*{WITHDRAWN}"):
        decode(FoldedLayout, {**layout, "dispatcher": "hierarchical"}, "layout")


def test_a_profile_is_read_without_what_only_withdrawn_things_asked_for() -> None:
    line = CollectiveLine(
        op="all_to_all", group_size=4, alpha_seconds=1e-5, beta_seconds_per_byte=1e-9
    )
    point = CollectivePoint(op="all_to_all", group_size=4, num_bytes=1024)
    sample = Sample(point=point, seconds=(0.5,))
    profile = replace(lab_profile(), collective=(line,), samples=(sample,))
    document = encode(profile)
    document["collective"].append({**document["collective"][0], "op": "all_to_all_2d"})
    of_old = encode(sample)
    of_old["point"]["op"] = "all_to_all_2d"
    document["samples"].append(of_old)
    product = GemmPoint(dtype="mxfp8", rows=8, d_in=64, d_out=64)
    gemm = replace(sample, point=product)
    rounding = RowsPoint(op="quantize", dtype="mxfp8", rows=8, width=64)
    emulated = replace(product, dtype="mxfp8_emulated")
    workload = Workload(layer=LAYER, world_size=2, tokens_per_rank=8)
    step = encode(replace(sample, point=StepPoint(workload=workload, degree=2)))
    step["point"]["workload"]["quantization"] = "mxfp8"
    document["samples"] += [
        encode(gemm), step, *(encode(replace(sample, point=old)) for old in (rounding, emulated))
    ]  # fmt: skip
    assert profile_from_document(document) == replace(profile, samples=(sample, gemm))
    assert without_unread_points("no table") == "no table"


@pytest.mark.parametrize(("cls", "key", "value", "what"), [
    (Alternative, "layout", {"dp": 8}, "the planner of the papers' whole models"),
    (Plan, "chunks", {"offload": True}, "the planner of the papers' whole models"),
    (Workload, "sequence_parallel", True, "shards of the tokens"),
    (TrainingStep, "hidden_by_shared_experts_seconds", 0.1, "the layer that runs shared experts"),
    (TrainingInputs, "search_trials", 64, "the search by trials"),
    (LayoutRequest, "dispatcher_sms", 20, "the choice of DeepEP's SMs"),
    (FoldedLayout, "dispatcher_sms", 20, "the choice of DeepEP's SMs"),
    (Profile, "corrections", [{}], "correction by observed steps"),
    (PlacementChoice, "replicas", [1], "replicas of hot experts"),
    (ModelPlacement, "replicas", [1], "replicas of hot experts"),
])  # fmt: skip
def test_a_withdrawn_key_has_a_hint(cls: type[Any], key: str, value: object, what: str) -> None:
    with pytest.raises(InputError, match=rf"^file has '{key}': {what}.*{WITHDRAWN}") as caught:
        decode(cls, {key: value}, "file")
    assert caught.value.hint


def test_a_profile_that_measured_turns_or_bursts_is_read_without_them() -> None:
    profile = lab_profile()
    plain = encode(profile)
    turns = {"point": {"kind": "turns", "degree": 1}, "seconds": [0.1]}
    burst = {"point": {"kind": "burst", "op": "all_to_all", "group_size": 2}, "seconds": [0.1]}
    plain["turns"] = [turns]
    plain["bursts"] = [{"op": "all_to_all", "group_size": 2, "seconds": 0.01}]
    plain["samples"] = [turns, burst, *plain["samples"]]
    assert profile_from_document(plain) == profile
    del plain["samples"], plain["turns"], plain["bursts"]
    assert profile_from_document(plain).samples == ()


def test_a_sample_without_a_point_is_named_as_before() -> None:
    plain = encode(lab_profile())
    plain["samples"] = ["turns", {"seconds": [0.1]}]
    with pytest.raises(InputError, match=r"profile\.samples\[0\] must be a table"):
        profile_from_document(plain)
    with pytest.raises(InputError, match="profile lacks the key 'schema'"):
        profile_from_document([])


@pytest.mark.parametrize(("inputs", "command"), [
    ({"model": "ppmoe-6.7b", "world_size": 32, "profile": "v100-x256"},
     "moetune plan --model ppmoe-6.7b --world-size 32 --profile v100-x256"),
    ({"model": None}, "moetune plan --num-layers, --num-heads, --seq, --vocab"),
])  # fmt: skip
def test_an_old_whole_model_says_how_to_plan_again(inputs: dict[str, Any], command: str) -> None:
    document = {**encode(small_plan(layer=LAYER)), "inputs": inputs, "transformer": {"zero": True}}
    with pytest.raises(InputError, match=WITHDRAWN) as seen:
        plan_from_document(document)
    assert str(seen.value.hint).endswith(command)


def test_a_withdrawn_key_that_was_not_used_is_let_be() -> None:
    plain = encode(small_plan(layer=LAYER))
    of_before = {**plain, "transformer": None, "chunks": None}
    assert plan_from_document(of_before) == small_plan(layer=LAYER)
    assert decode(LayoutRequest, {"tp": 2, "dispatcher_sms": None}, "pins") == LayoutRequest(tp=2)
    workload = Workload(layer=LAYER, world_size=2, tokens_per_rank=8)
    assert decode(Workload, {**encode(workload), "sequence_parallel": False}, "load") == workload


def test_a_withdrawn_value_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"expert_placement has 'once': .* was withdrawn on 20"):
        decode(LayoutRequest, {"expert_placement": "once"}, "plan.inputs.pins")
