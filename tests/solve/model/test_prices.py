"""Prices and memory of steps: physical limits, and what recomputation and dispatchers change."""

import itertools
import math
from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.profile import Profile
from moetune.domain.recurrent import GatedDeltaNet, StateSpace
from moetune.domain.routing import reached_ranks
from moetune.domain.samples import AttentionPoint, GemmForm, Sample
from moetune.domain.targets import TARGETS, find_target
from moetune.domain.training import (
    RECOMPUTES,
    FoldedLayout,
    Recompute,
    TokenDispatcher,
    TrainingDtype,
    TrainingJob,
)
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import model_names, named_model
from moetune.solve.model.activations import AS_MEGATRON
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.exchange import exchange_seconds
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.passes import computed_keys
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.step import StepPrices, StepSeconds

H100 = load_profile_file(bundled_profiles()["h100-x8"])
ROW_BYTES = 2048 * 2
PEAK_FLOPS = 989e12
"""bfloat16, dense, of the H100's data sheet."""


def device(profile: Profile = H100) -> DevicePrices:
    return DevicePrices(
        costs=costs_of(profile, allow_modelled=True),
        machine=profile.machine,
        sustained=1.0,
        gap_seconds=0.0,
        posted_chunk_seconds=0.0,
    )


def job_of(name: str, *, world_size: int = 64, dtype: TrainingDtype = "bfloat16") -> TrainingJob:
    return TrainingJob(
        decoder=named_model(name).decoder, world_size=world_size, global_batch=256, length=4096,
        dtype=dtype,
    )  # fmt: skip


def step_of(job: TrainingJob, layout: FoldedLayout, target: str = "megatron") -> StepSeconds:
    prices = StepPrices(
        job=job, device=device(), stages=DecoderStages(job.decoder), target=find_target(target)
    )
    return prices.step(layout)


def peak_of(job: TrainingJob, layout: FoldedLayout) -> float:
    return (
        MemoryModel(job=job, stages=DecoderStages(job.decoder), target=AS_MEGATRON)
        .peak(layout)
        .peak_bytes
    )


@pytest.mark.parametrize("name", model_names())
def test_no_step_is_faster_than_the_peak_of_the_device(name: str) -> None:
    job = job_of(name)
    layout = FoldedLayout(dp=32, pp=2, ep=(job.decoder.layer.num_experts > 1 and 2) or 1)
    step = step_of(job, layout)
    flops = job.decoder.flops_per_token(job.length).total * job.tokens / job.world_size
    assert step.seconds > flops / PEAK_FLOPS
    assert step.seconds < 20 * flops / PEAK_FLOPS
    assert math.isclose(sum(step.parts.values()), step.seconds, rel_tol=1e-9)


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("module", RECOMPUTES)
def test_recomputation_takes_no_less_time_and_no_more_memory(name: str, module: Recompute) -> None:
    job, layout = job_of(name), FoldedLayout(dp=32, tp=2, ep=8)
    again = replace(layout, recompute=(module,))
    assert step_of(job, again).seconds >= step_of(job, layout).seconds
    assert peak_of(job, again) <= peak_of(job, layout)


def test_what_the_layer_computes_again_in_any_case_is_no_recomputation() -> None:
    job, layout = job_of("qwen3-30b-a3b"), FoldedLayout(dp=64, ep=8)
    kept, again = (step_of(job, layout, target).parts for target in ("megatron", "moetune"))
    assert "recompute" not in again
    assert "recompute" not in kept
    assert again["moe_act"] > kept["moe_act"]


def test_a_ring_of_keys_is_exposed_where_attention_is_short() -> None:
    job = replace(job_of("qwen3-30b-a3b"), length=512)
    step = step_of(job, FoldedLayout(dp=1, cp=64, ep=8))
    assert step.parts["context_comm"] > 0


def test_the_host_launches_each_expert_in_8_bits_and_none_of_a_grouped_kernel() -> None:
    layout = FoldedLayout(dp=64, ep=8)
    wide = replace(layout, ep=2)
    waits = {
        (target, dtype, choice.ep): step_of(
            job_of("qwen3-30b-a3b", dtype=dtype), choice, target
        ).parts.get("launches", 0.0)
        for target in ("megatron", "torchtitan")
        for dtype in ("bfloat16", "fp8")
        for choice in (layout, wide)
    }
    assert waits["megatron", "fp8", 2] > waits["megatron", "bfloat16", 2]
    assert waits["megatron", "fp8", 2] > waits["megatron", "fp8", 8]
    assert waits["torchtitan", "fp8", 2] <= waits["megatron", "fp8", 2]


def test_attention_is_slower_with_narrow_heads_and_in_small_windows() -> None:
    made = device()
    for backward in (False, True):
        narrow, full, wide = (
            made.attention_core(
                1e12, head_dim=dim, length=4096, backward=backward, has_flash2=False
            )
            for dim in (64, 128, 256)
        )
        assert narrow == pytest.approx(full * 2**0.5)
        assert full == wide
    job = job_of("gpt-oss-20b")
    block, part = next(
        (block, part)
        for block in job.decoder.kinds
        for part in block.parts
        if isinstance(part, GroupedQueryAttention) and part.window
    )
    prices = BlockPrices(job=job, layout=FoldedLayout(dp=64, ep=8), device=made)
    macs = part.forward_macs(4096) - part.forward_macs(1)
    core = prices.local_times(block).passes("core_attn").forward
    assert core > made.attention_core(
        4096 * macs, head_dim=64, length=4096, backward=False, has_flash2=False
    )


def test_attention_takes_as_long_as_the_profile_measured_it() -> None:
    job, layout = job_of("mixtral-8x7b"), FoldedLayout(dp=64, ep=8)
    samples = tuple(
        Sample(
            point=AttentionPoint(
                dtype="bfloat16", num_sequences=count, length=4096, num_heads=32, head_dim=128
            ),
            seconds=(0.5 * count,),
        )
        for count in (1, 2, 4)
    )
    profile = replace(H100, samples=(*H100.samples, *samples))
    prices = BlockPrices(job=job, layout=layout, device=device(profile))
    core = prices.local_times(job.decoder.kinds[0]).passes("core_attn")
    assert core.forward == pytest.approx(0.5, rel=1e-3)  # and a launch


@pytest.mark.parametrize("name", ["nemotron-3-nano", "qwen3-next-80b-a3b"])
def test_recurrences_take_at_least_the_time_to_move_their_states(name: str) -> None:
    job, made = job_of(name), device()
    block, state = next(
        (block, part.state)
        for block in job.decoder.kinds
        for part in block.parts
        if isinstance(part, StateSpace | GatedDeltaNet)
    )
    prices = BlockPrices(job=job, layout=FoldedLayout(dp=64, ep=8), device=made)
    core = prices.local_times(block).passes("core_attn")
    assert core.forward > made.memory_seconds(4096 * 16 * state / 128)
    assert core.grad_input > 2 * made.memory_seconds(4096 * 16 * state / 128)


def test_projections_to_latent_experts_and_back_are_whole_on_each_tensor_rank() -> None:
    job, made = job_of("nemotron-3-super"), device()
    part = next(filter(None, job.decoder.routed_kinds))
    assert part.latent
    prices = BlockPrices(job=job, layout=FoldedLayout(dp=32, tp=2, ep=64), device=made)
    narrow = replace(part, d_model=part.latent, latent=None)
    full, bare = (prices.routed_times(kind).passes("experts") for kind in (part, narrow))
    there, back = (
        made.gemm("forward", rows=2048, d_in=d_in, d_out=d_out)
        for d_in, d_out in itertools.permutations((part.d_model, part.latent))
    )
    assert full.forward - bare.forward == pytest.approx(there + back)


def test_sharded_gradients_and_parameters_cost_a_reduction_a_micro_batch() -> None:
    job = job_of("mixtral-8x22b")
    times = [step_of(job, FoldedLayout(dp=64, zero=zero)).seconds for zero in (1, 2, 3)]
    assert times == sorted(times)
    assert step_of(job, FoldedLayout(dp=64), "moetune").seconds > times[0]


@pytest.mark.parametrize(
    ("name", "ranks", "gib"), [("deepseek-v3", 16, 6.52), ("glm-4.5-air", 8, 2.72)]
)
def test_two_of_the_blocks_that_have_most_to_shard_are_whole_for_a_while(
    name: str, ranks: int, gib: float
) -> None:
    """Experts on as many ranks as there are have no replicas: a dense block has most to shard."""
    job = replace(job_of(name, world_size=ranks), global_batch=ranks)
    memory = MemoryModel(job=job, stages=DecoderStages(job.decoder), target=AS_MEGATRON)
    gathered = memory.peak(FoldedLayout(dp=ranks, ep=ranks, zero=3)).parts["gathered"]
    amounts = [block.parameters for block in job.decoder.kinds]
    largest = max(amount.total - amount.routed for amount in amounts)
    assert gathered == pytest.approx(2 * (4 + 2) * largest)
    assert gathered == pytest.approx(gib * 2**30, rel=1e-3)
    replicated = memory.peak(FoldedLayout(dp=ranks, ep=ranks // 2, zero=3)).parts["gathered"]
    largest = max(amount.total - amount.routed * (1 - 2 / ranks) for amount in amounts)
    assert replicated == pytest.approx(2 * (4 + 2) * largest)


@pytest.mark.parametrize(("dispatcher", "seconds"), [
    ("all_to_all", 8 * 100 * ROW_BYTES),
    ("all_gather", 100 * ROW_BYTES),
])  # fmt: skip
def test_exchanges_send_what_the_dispatcher_sends(
    dispatcher: TokenDispatcher, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = named_model("qwen3-30b-a3b").decoder.blocks[0].routed
    assert part is not None
    made = device()

    def seconds_of(key: CollectiveKey, size: float) -> Estimate[float]:
        assert isinstance(key, CollectiveKey)
        return Estimate(seconds=float(size), trust="measured")

    monkeypatch.setattr(type(made.costs), "seconds", staticmethod(seconds_of))
    layout = FoldedLayout(dp=8, ep=8, dispatcher=dispatcher)
    sent = exchange_seconds(made, layout=layout, part=part, tokens=100.0, phase="dispatch")
    assert sent == seconds
    back = exchange_seconds(made, layout=layout, part=part, tokens=100.0, phase="combine")
    assert back == (seconds if dispatcher == "all_to_all" else 8 * seconds)


def test_only_windows_make_kernels_compute_more_than_they_need() -> None:
    mixers = [part for name in model_names() for part in named_model(name).decoder.mixers]
    plain = [part for part in mixers if getattr(part, "window", None) is None]
    assert {computed_keys(part) for part in plain} == {1.0}
    windowed = [part for part in mixers if isinstance(part, GroupedQueryAttention) and part.window]
    assert min(map(computed_keys, windowed)) > 1


def test_an_all_to_all_that_sends_tokens_once_sends_them_to_the_ranks_of_their_experts() -> None:
    """Against every choice of 3 of 8 experts on 4 ranks."""
    choices = [*itertools.combinations(range(8), 3)]
    ranks = sum(len({expert // 2 for expert in chosen}) for chosen in choices) / len(choices)
    assert reached_ranks(3, 8, 4) == pytest.approx(ranks, rel=1e-12)
    assert reached_ranks(3, 8, 8) == pytest.approx(3)
    layer = LayerShape(d_model=8, d_hidden=8, num_experts=8, top_k=3)
    for world_size, share in ((1, 1.0), (4, ranks / 3), (8, 1.0)):
        workload = Workload(layer=layer, world_size=world_size, tokens_per_rank=4)
        assert workload.sent_share == pytest.approx(share)


def test_a_profile_without_adam_is_refused() -> None:
    made = device(replace(H100, rows=()))
    with pytest.raises(ProfileError, match="Adam"):
        made.memory_seconds(1e6)
    assert made.gemm("forward", rows=0, d_in=8, d_out=8) == 0


def test_scatters_of_tensor_ranks_overlap_gradients_of_weights_in_megatron() -> None:
    layout, megatron = FoldedLayout(dp=16, tp=4), find_target("megatron")
    shown, hidden, pieces = (
        BlockPrices(job=job_of("mixtral-8x22b"), layout=layout, device=device(), target=target)
        for target in (
            replace(megatron, overlaps_input_scatter=False),
            megatron,
            replace(megatron, multiplies_in_pieces=True),
        )
    )
    [block] = shown.job.decoder.kinds
    sent = [prices.local_times(block).passes("tensor_comm") for prices in (shown, hidden, pieces)]
    # By hand: a gather before attention's matrices and a scatter behind them, than which gradients
    # of the weights are longer; in four pieces one is left of what is shown.
    span, whole = device().span(4, 1), 2.0 * 4096 * 6144
    gather = device().collective("all_gather", span, whole / 4)
    scatter = device().collective("reduce_scatter", span, whole)
    assert sent[0] == pytest.approx((gather + scatter, gather + scatter, 0.0))
    assert sent[1] == pytest.approx((gather + scatter, gather, 0.0))
    assert sent[2].grad_input == pytest.approx(gather / 4)
    assert sent[2].forward == pytest.approx((gather + scatter) / 4, rel=0.3)
    overlapping = [name for name in TARGETS if find_target(name).overlaps_input_scatter]
    assert overlapping == ["megatron", "bridge"]


def test_gemms_in_pieces_take_each_but_input_gradients_of_the_first_are_whole() -> None:
    job, megatron = job_of("qwen3-8b"), find_target("megatron")
    whole, cut = (
        BlockPrices(job=job, layout=FoldedLayout(dp=8, tp=8), device=device(), target=target)
        .local_times(job.decoder.kinds[0])
        .passes("mlp")
        for target in (megatron, replace(megatron, multiplies_in_pieces=True))
    )
    gemm, up, down = device().gemm, (4096, 2 * 12288 // 8), (12288 // 8, 4096)

    def more(product: GemmForm, pieces: int, size: tuple[int, int]) -> float:
        seconds = (gemm(product, rows=4096 / n, d_in=size[0], d_out=size[1]) for n in (pieces, 1))
        return pieces * next(seconds) - next(seconds)

    later = more("forward", 8, up) + more("forward", 4, down)
    assert cut.forward - whole.forward == pytest.approx(later)
    assert cut.grad_input - whole.grad_input == pytest.approx(more("grad_input", 8, down))
    assert cut.grad_weight == whole.grad_weight


def test_torch_copies_what_tensor_ranks_exchange_and_waits_for_keys_of_context_ranks() -> None:
    job, titan = job_of("mixtral-8x22b"), find_target("torchtitan")
    plain, copied, alone = (
        BlockPrices(job=job, layout=FoldedLayout(cp=2, tp=4), device=device(), target=target)
        .local_times(job.decoder.kinds[0])
        for target in (
            replace(titan, copies_sequence=False), titan, replace(titan, splits_sequence=False),
        )
    )  # fmt: skip
    # By hand: half of a sequence is gathered and scattered, each time read and written.
    more = 2 * 2 * 2 * 2048 * 6144 / device().memory_bytes_per_second + 2 * 3e-6
    sent = [times.passes("tensor_comm").forward for times in (plain, copied)]
    assert sent[1] - sent[0] == pytest.approx(more)
    span, keys = device().span(2, 4), 2 * 2 * 2048 * 8 * 128 / 4
    gather, scatter = (
        device().collective("all_gather", span, keys),
        device().collective("reduce_scatter", span, 2 * keys),
    )
    assert copied.passes("context_comm") == pytest.approx((gather, scatter, 0.0))
    # A block's two norms are two kernels each; without shared sequences each rank has all tokens.
    split, whole = (times.passes("norm").forward - 4 * 3e-6 for times in (copied, alone))
    assert whole == pytest.approx(4 * split)


def test_a_loss_takes_the_bytes_that_its_kernels_move() -> None:
    job, layout = job_of("qwen3-8b"), FoldedLayout(dp=64)
    fused, plain = (step_of(job, layout, target).parts["head"] for target in ("bridge", "megatron"))
    # Four micro-batches; Megatron-Core's own loss moves 52 bytes of a logit, a fused one 16.
    more = 4 * 36 * 4096 * 151936 / device().memory_bytes_per_second
    assert plain - fused == pytest.approx(more)


def test_narrow_factors_are_gathered_narrow_and_scattered_in_bfloat16() -> None:
    layout, span = FoldedLayout(dp=16, tp=4), device().span(4, 1)
    prices = BlockPrices(job=job_of("mixtral-8x22b", dtype="fp8"), layout=layout, device=device())
    elements = 4096 * 6144
    both = device().collective("all_gather", span, elements / 4)
    both += device().collective("reduce_scatter", span, 2.0 * elements)
    passes = prices.local_times(prices.job.decoder.kinds[0]).passes("tensor_comm")
    assert passes.forward == pytest.approx(both)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep", "hybrid_ep"])
def test_rows_in_eight_bits_are_copied_to_fill_tiles_but_where_hybrid_ep_does(
    dispatcher: TokenDispatcher,
) -> None:
    layout = FoldedLayout(dp=64, ep=8, dispatcher=dispatcher)
    plain, narrow = (
        step_of(job_of("qwen3-30b-a3b", dtype=dtype), layout).parts["permute"]
        for dtype in ("bfloat16", "fp8")
    )
    # By hand: padded and without padding again, read and written, both passes; 48 blocks, four
    # micro-batches, eight experts a token; two kernels of 3 µs more in each pass.
    copied = 2 * 4 * 2 * 2048 * 8 * 4096 / device().memory_bytes_per_second + 2 * 2 * 3e-6
    copied *= 48 * 4
    expected = 0.0 if dispatcher == "hybrid_ep" else copied
    assert narrow - plain == pytest.approx(expected, rel=0.01)
