"""Kernels of runtimes and devices, against bytes by hand and rates that others published."""

from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.routing import BALANCED, NATURAL
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout
from moetune.fit.costs import costs_of
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.step import StepPrices, StepSeconds
from tests.solve.model.test_prices import device, job_of, step_of

LAYOUT = FoldedLayout(dp=64, ep=8, micro_batch=2)


def device_named(profile: str) -> DevicePrices:
    machine = load_profile_file(bundled_profiles()[profile])
    return DevicePrices(
        costs=costs_of(machine, allow_modelled=True),
        machine=machine.machine,
        sustained=1.0,
        gap_seconds=0.0,
        posted_chunk_seconds=0.0,
    )


def step_on(prices: DevicePrices, name: str, layout: FoldedLayout) -> StepSeconds:
    job = job_of(name)
    return StepPrices(
        job=job, device=prices, stages=DecoderStages(job.decoder), target=find_target("megatron")
    ).step(layout)


@pytest.mark.parametrize(
    ("length", "backward", "published"),
    [(4096, False, 1324), (16384, False, 1698), (4096, True, 1083), (16384, True, 1298)],
)
@pytest.mark.parametrize("profile", ["b200-x8", "gb200-nvl72", "gb300-nvl72"])
def test_attention_on_blackwell_is_cudnns(
    profile: str, length: int, *, backward: bool, published: float
) -> None:
    # arXiv 2603.07685, Table 9: TFLOP/s of cuDNN with DeepSeek-V3's heads.
    seconds = device_named(profile).attention_core(
        1e12, head_dim=160, length=length, backward=backward, has_flash2=False
    )
    teraflops = (2.5 if backward else 1.0) * 2e12 / seconds / 1e12
    assert teraflops == pytest.approx(published, rel=0.02)


def test_kernels_that_are_not_fused_read_and_write_more() -> None:
    job = job_of("qwen3-30b-a3b")
    fused, eager = (step_of(job, LAYOUT, target).parts for target in ("megatron", "torchtitan"))
    slowdown = find_target("torchtitan").kernels.slowdown
    assert eager["experts"] == pytest.approx(slowdown * fused["experts"])
    for name in ("permute", "moe_act", "norm", "core_attn"):
        assert eager[name] > 1.1 * slowdown * fused[name]
    # By hand: 48 blocks with two norms, of 2,048 numbers in each token of two sequences, three
    # tensors of bfloat16 more in both passes; four sequences of each rank.
    tokens = 4 * 4096
    added = 48 * 2 * 3 * 2 * 2048 * tokens / device().memory_bytes_per_second
    assert eager["norm"] / slowdown - fused["norm"] == pytest.approx(added, rel=1e-6)


def test_only_hopper_has_a_faster_attention_than_flash_2() -> None:
    for profile, is_slower in (("h100-x8", True), ("a100-x8", False), ("b200-x8", False)):
        prices = device_named(profile)
        both = [
            prices.attention_core(
                1e12, head_dim=128, length=8192, backward=False, has_flash2=has_flash2
            )
            for has_flash2 in (False, True)
        ]
        assert (both[1] > both[0]) == is_slower


def test_experts_that_add_biases_take_further_kernels_but_in_whole_graphs() -> None:
    plain = step_of(job_of("gpt-oss-120b"), LAYOUT)
    whole = step_of(job_of("gpt-oss-120b"), replace(LAYOUT, cuda_graphs="full"))
    # By hand: 36 blocks, four experts a token, 2,880 wide inside and outside: 73 and 29 tensors.
    rows = 4 * 4096 * 4
    added = 36 * 2 * rows * 2880 * (27 + 46 + 14 + 15) / device().memory_bytes_per_second
    assert plain.parts["moe_act"] - whole.parts["moe_act"] == pytest.approx(added, rel=0.01)


def test_launches_bind_small_batches_and_graphs_of_the_whole_iteration_have_none() -> None:
    job, layout = job_of("qwen3-30b-a3b"), FoldedLayout(dp=32, tp=2, ep=8, micro_batch=1)
    plain, partial, full = (
        step_of(job, replace(layout, cuda_graphs=graphs)) for graphs in ("none", "partial", "full")
    )
    assert plain.bound_by_host > 0.5 * plain.seconds
    assert full.bound_by_host == 0
    assert "launches" not in full.parts
    assert plain.seconds > partial.seconds > full.seconds
    large = step_of(job, FoldedLayout(dp=64, ep=8, micro_batch=4))
    assert large.bound_by_host == 0


def test_hosts_of_grace_launch_slower() -> None:
    layout = FoldedLayout(dp=32, tp=2, ep=8, micro_batch=1)
    grace = device_named("gb200-nvl72")
    x86 = replace(grace, machine=replace(grace.machine, device="NVIDIA B200"))
    slow, fast = (step_on(prices, "qwen3-30b-a3b", layout) for prices in (grace, x86))
    assert slow.parts["launches"] > fast.parts["launches"]


def test_the_fullest_rank_of_natural_routing_is_less_full_on_the_mean_than_memory_needs() -> None:
    job = replace(job_of("qwen3-235b-a22b"), routing=NATURAL)
    [part] = {routed for routed in job.decoder.routed_kinds if routed is not None}
    skew = job.skew(part, 8)
    assert skew.p99 == NATURAL.skew(128, 8.0, 8)
    assert skew.mean - 1 == pytest.approx(0.75 * (skew.p99 - 1))
    balanced = replace(job, routing=BALANCED).skew(part, 8)
    assert balanced.mean == balanced.p99 == 1
