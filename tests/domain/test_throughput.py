"""Model FLOPs of plans against hand-computed numbers, and their share of a data sheet's peak."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.domain.any_plan import plan_from_document
from moetune.domain.chips import peak_flops
from moetune.domain.document import encode
from moetune.domain.experts import RoutedExperts, Router
from moetune.domain.layer import LayerShape, Throughput, Workload, layer_flops, rate
from moetune.domain.model import MODELS
from moetune.domain.plan import Plan
from moetune.domain.question import Question
from moetune.fit.speeds import Speeds, scale_profile

GPT_XL = MODELS["gpt-xl"].layer(8)
GPT_XL_FLOPS = 6 * 8192 * 2 * 2048 * 8192
"""Three passes, two operations a MAC, of 8,192 tokens through both matrices of one expert."""


def plan_on(profile: str, **asked: Any) -> Plan:
    return make_plan(Question(**asked), profile=load_profile_file(bundled_profiles()[profile]))


def workload(**fields: Any) -> Workload:
    return Workload(**{"layer": GPT_XL, "world_size": 8, "tokens_per_rank": 8192, **fields})


def test_a_layer_counts_three_times_its_forward_gemms() -> None:
    assert layer_flops(workload()) == GPT_XL_FLOPS
    shape = LayerShape(d_model=64, d_hidden=96, num_experts=8, top_k=2, activation="swiglu")
    experts = RoutedExperts(
        d_model=64, num_experts=8, top_k=2, d_hidden=96, is_gated=True, function="silu",
        router=Router(score="softmax", parameters=512),
    )  # fmt: skip
    expected = 6 * 100 * experts.forward_macs().total
    assert layer_flops(workload(layer=shape, tokens_per_rank=100)) == expected


def test_tensor_parallel_ranks_share_the_flops_of_their_tokens() -> None:
    flops = layer_flops(workload(expert_parallel="tensor"))
    assert flops == GPT_XL_FLOPS / 8


def test_a_layers_plan_has_its_rate_and_its_share_of_the_peak() -> None:
    predicted = plan_on("h100-x8", model="gpt-xl", dtype="bfloat16").predicted
    expected = GPT_XL_FLOPS / predicted.step_seconds
    assert predicted.model_flops_per_second_per_device == pytest.approx(expected)
    assert predicted.mfu == pytest.approx(expected / 989.5e12)


@pytest.mark.parametrize(("profile", "asked"), [
    ("h100-x8", {"model": "gpt-xl", "dtype": "bfloat16"}),
    (
        "v100-x256",
        {"model": "gpt-xl", "world_size": 8, "dtype": "float16",
         "expert_parallel": "tensor", "allow_modelled": True},
    ),
])  # fmt: skip
def test_older_plans_are_counted_again_without_a_peak(profile: str, asked: dict[str, Any]) -> None:
    plan = plan_on(profile, **asked)
    known = plan.throughput
    assert known is not None
    document = encode(plan)
    for key in ("model_flops_per_second_per_device", "mfu"):
        document["predicted"].pop(key, None)
    older = plan_from_document(document)
    assert older.id == plan.id
    throughput = older.throughput
    assert throughput is not None
    assert throughput.flops_per_second == pytest.approx(known.flops_per_second)
    assert throughput.mfu is None


def test_a_faster_device_than_there_is_has_no_mfu() -> None:
    profile = load_profile_file(bundled_profiles()["h100-x8"])
    request = Question(model="gpt-xl", dtype="bfloat16")
    links = scale_profile(profile, Speeds(communication=2.0))
    assert make_plan(request, profile=links).predicted.mfu is not None
    faster = scale_profile(profile, Speeds(computation=2.0))
    assert make_plan(request, profile=faster).predicted.mfu is None


def test_a_step_of_no_time_has_no_rate() -> None:
    assert rate(1.0, 0.0, None) is None
    assert Throughput(flops_per_second=1.0, mfu=None).over(0.0, 1.0) is None
    plan = plan_on("h100-x8", model="gpt-xl", dtype="bfloat16")
    no_time = replace(
        plan.predicted, step_seconds=0.0, model_flops_per_second_per_device=None, mfu=None
    )
    assert replace(plan, predicted=no_time).throughput is None


def test_the_same_work_in_twice_the_time_is_half_the_rate() -> None:
    slower = Throughput(flops_per_second=8e12, mfu=0.5).over(4.0, 2.0)
    assert slower == Throughput(flops_per_second=4e12, mfu=0.25)


def test_peaks_are_dense_and_of_one_device() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert peak_flops("NVIDIA GB300", "nvfp4") == 15e15
    assert peak_flops("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert peak_flops("NVIDIA GeForce RTX 2080 Ti", "float16") == 53.8e12
    assert peak_flops("AMD EPYC 9B14", "float32") is None
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") is None
    assert peak_flops("NVIDIA A100 80GB PCIe", "bfloat16") == 312e12
    assert peak_flops("AMD Instinct MI300X", "mxfp8") is None
    for path in bundled_profiles().values():
        assert peak_flops(load_profile_file(path).machine.device, "float16")
