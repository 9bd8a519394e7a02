"""moetune's layer in a model's step: against the plan of the same layer, and its profile's rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.costs import Costs
from moetune.domain.experts import RoutedExperts
from moetune.domain.layer import Workload
from moetune.domain.profile import Profile
from moetune.domain.routing import NATURAL
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.fit.costs import costs_of
from moetune.fit.speeds import GEMM_RATE, Slowdown, slowed
from moetune.huggingface.registry import find_decoder_model
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.model.block import BlockPrices
from moetune.solve.model.chunks import chunked_passes
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.profiled import device_prices
from moetune.solve.model.step import StepPrices
from tests.golden.cases import LAB as LAB_FILE

LAB = load_profile_file(Path(LAB_FILE))
H100, PAPERS = (load_profile_file(bundled_profiles()[name]) for name in ("h100-x8", "v100-x256"))
MOETUNE, MEGATRON = find_target("moetune"), find_target("megatron")
TOKENS = 4096
QWEN = "qwen3-30b-a3b"


def job_of(name: str, world_size: int, **changes: object) -> TrainingJob:
    decoder = find_decoder_model(name, world_size=world_size).decoder
    assert decoder is not None
    job = TrainingJob(decoder=decoder, world_size=world_size, global_batch=64, length=TOKENS)
    return replace(job, **changes)  # type: ignore[arg-type]  # its fields


def prices_of(
    name: str, profile: Profile, layout: FoldedLayout, **changes: object
) -> tuple[BlockPrices, RoutedExperts]:
    job = job_of(name, layout.world_size, **changes)
    device = device_prices(profile, costs_of(profile, allow_modelled=True), job.element)
    part = next(part for part in reversed(job.decoder.routed_kinds) if part is not None)
    return BlockPrices(job=job, layout=layout, device=device, target=MOETUNE), part


def seconds_of_plan(costs: Costs, workload: Workload, degree: int) -> float:
    """Return the step of the layer's own plan."""
    layer = layer_costs(workload=workload, costs=costs)
    return step_time(costs=layer, tokens=workload.tokens_per_rank, degree=degree).seconds


def seconds_in_model(prices: BlockPrices, part: RoutedExperts, degree: int) -> float:
    times = prices.routed_times(part)
    both = times.compute + times.communication
    saved = chunked_passes(prices, part, degree).saved(degree, repeats=False)
    return both.forward + both.backward - sum(saved)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", ["mixtral-8x7b", QWEN])
def test_a_measured_layer_takes_as_long_in_a_model_as_in_its_plan(
    name: str, micro_batch: int, degree: int
) -> None:
    prices, part = prices_of(name, LAB, FoldedLayout(dp=2, ep=2, micro_batch=micro_batch))
    workload = Workload(
        layer=part.layer, world_size=2, tokens_per_rank=TOKENS * micro_batch, dtype="bfloat16"
    )
    planned = seconds_of_plan(costs_of(LAB), workload, degree)
    assert seconds_in_model(prices, part, degree) == pytest.approx(planned, rel=1e-9)
    assert prices.device.layer_launch_seconds == 0  # on a CPU


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("name", ["mixtral-8x7b", QWEN])
def test_gemms_of_published_tables_take_what_they_do_in_a_step(name: str, degree: int) -> None:
    """In the layer's plan as in a model's, whose tokens take longer than launches around them."""
    prices, part = prices_of(name, H100, FoldedLayout(dp=2, ep=2, micro_batch=16))
    workload = Workload(
        layer=part.layer, world_size=2, tokens_per_rank=16 * TOKENS, dtype="bfloat16"
    )
    slow = slowed(costs_of(H100), Slowdown(part=GEMM_RATE, factor=1 / 0.85))
    alone = replace(layer_costs(workload=workload, costs=slow), gemm_factor=1.0, gap_seconds=0.0)
    seconds = step_time(costs=alone, tokens=16 * TOKENS, degree=degree).seconds
    seconds += 15e-6 * (9 * degree + 3)  # behind each GEMM of the experts and of the gate
    assert seconds_of_plan(costs_of(H100), workload, degree) == pytest.approx(seconds, rel=1e-9)
    assert seconds_in_model(prices, part, degree) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("degree", [1, 2])
def test_experts_inside_a_tensor_parallel_group_are_those_of_its_plan(degree: int) -> None:
    layout = FoldedLayout(dp=1, tp=2, ep=2, dispatcher="all_gather", micro_batch=2)
    prices, part = prices_of("ppmoe-6.7b", LAB, layout)
    workload = Workload(
        layer=part.layer, world_size=2, tokens_per_rank=2 * TOKENS, dtype="bfloat16",
        expert_parallel="tensor",
    )  # fmt: skip
    planned = seconds_of_plan(costs_of(LAB), workload, degree)
    assert seconds_in_model(prices, part, degree) == pytest.approx(planned, rel=1e-9)


def test_the_fullest_rank_of_natural_routing_has_its_rows() -> None:
    layout = FoldedLayout(dp=2, ep=2)
    (even, part), (uneven, _) = (
        prices_of("olmoe", LAB, layout, **routing) for routing in ({}, {"routing": NATURAL})
    )
    skew = uneven.job.skew(part, 2).mean
    assert skew > 1.02
    full = replace(even.layer(part)[0], skew=skew)
    step = step_time(costs=full, tokens=TOKENS, degree=4)
    assert seconds_in_model(uneven, part, 4) == pytest.approx(step.seconds, rel=1e-9)


def with_slow(profile: Profile, ops: tuple[str, ...]) -> Profile:
    """Return the profile with ten times the seconds of some operations on rows."""
    rows = [
        replace(
            row, alpha_seconds=10 * row.alpha_seconds,
            beta_seconds_per_element=10 * row.beta_seconds_per_element,
        )
        if row.op in ops
        else row
        for row in profile.rows
    ]  # fmt: skip
    return replace(profile, rows=tuple(rows))


@pytest.mark.parametrize(
    ("ops", "slower"),
    [
        (("gather", "scatter_add"), "permute"),
        (("gate", "gate_backward"), "router"),
        (("swiglu", "swiglu_backward"), "moe_act"),
        (("chunked_layer", "chunked_layer_step"), "launches"),
    ],
)
def test_what_a_profile_says_of_rows_and_launches_is_in_the_step(
    ops: tuple[str, ...], slower: str
) -> None:
    job, layout = job_of(QWEN, 8), FoldedLayout(dp=8, ep=8, micro_batch=4)
    before, after = (
        StepPrices(
            job=job, device=device_prices(profile, costs_of(profile, allow_modelled=True)),
            stages=DecoderStages(job.decoder), target=MOETUNE,
        ).step(layout)
        for profile in (H100, with_slow(H100, ops))
    )  # fmt: skip
    changed = {
        name
        for name, seconds in after.parts.items()
        if seconds > 1.5 * before.parts.get(name, 0.0) and seconds > 1e-3 * after.seconds
    }
    assert changed == {slower}
    assert sum(after.parts.values()) == pytest.approx(after.seconds)


def test_rows_that_a_profile_lacks_are_modelled_by_the_rate_of_the_memory() -> None:
    prices, part = prices_of("ppmoe-6.7b", PAPERS, FoldedLayout(dp=8, ep=8), dtype="float16")
    mine, others = (
        replace(prices, target=target).routed_times(part) for target in (MOETUNE, MEGATRON)
    )
    assert mine.passes("permute") == pytest.approx(others.passes("permute"))
    assert mine.passes("router") == pytest.approx(others.passes("router"))
    assert mine.passes("moe_act").forward == pytest.approx(others.passes("moe_act").forward)


@pytest.mark.parametrize("refused", [{"etp": 2}, {"dispatcher": "deepep"}])
def test_what_the_layer_refuses_has_the_price_of_other_runtimes(refused: dict[str, object]) -> None:
    layout = replace(FoldedLayout(dp=16, ep=8), **refused)  # type: ignore[arg-type]  # its fields
    prices, part = prices_of(QWEN, H100, layout)
    mine, others = (
        replace(prices, target=target).routed_times(part) for target in (MOETUNE, MEGATRON)
    )
    assert mine.passes("exchange") == others.passes("exchange")
    assert mine.passes("permute") == others.passes("permute")
