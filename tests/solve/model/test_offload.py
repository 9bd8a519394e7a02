"""Activations and optimizers in host memory: bytes, copies, the search, and what refuses them."""

from dataclasses import replace

import pytest

from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.domain.errors import InputError, LayoutTooLargeError, RefusedLayoutError
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.domain.units import format_bytes
from moetune.huggingface.registry import named_model
from moetune.solve.model.best import BestLayouts
from tests.solve.model.brute_force import H100, OLMOE, search_of

JOB = TrainingJob(decoder=OLMOE, world_size=8, global_batch=64, length=4096)
PLAIN = FoldedLayout(dp=8, ep=8, micro_batch=4)
PINS = LayoutRequest(tp=1, pp=1, ep=8, micro_batch=4, recompute=(), overlap="none")


def copy_seconds(num_bytes: float) -> float:
    line = next(copy for copy in H100.copy if not copy.both_ways)
    return line.alpha_seconds + line.beta_seconds_per_byte * num_bytes


def test_blocks_go_to_the_host_but_for_two_and_copies_wait_behind_passes() -> None:
    search = search_of(JOB)
    plain, half = map(search.price, (PLAIN, replace(PLAIN, offload_activations=0.5)))
    kept = plain.memory.parts["activations"]
    assert half.memory.host_bytes == pytest.approx(kept / 2)
    assert half.memory.parts["activations"] == pytest.approx(kept * (8 + 2) / 16)
    assert plain.memory.host_bytes == 0
    (stage,) = search.prices.pipeline(PLAIN).stages
    copies = copy_seconds(kept / 2)
    waits = max(0.0, copies - stage.forward) + max(0.0, copies - stage.backward)
    assert waits > 0
    assert half.step.parts["offload"] == pytest.approx(2 * waits)
    assert half.step.seconds == pytest.approx(plain.step.seconds + 2 * waits)
    assert sum(half.step.parts.values()) == pytest.approx(half.step.seconds)
    assert sum(half.memory.parts.values()) == pytest.approx(half.memory.peak_bytes)
    split = replace(PLAIN, dp=4, pp=2, schedule="zero_bubble")  # which no runtime offloads with
    first, waiting = (
        search.prices.pipeline(replace(split, offload_activations=share)).stages[0]
        for share in (0.0, 0.5)
    )
    assert sum(waiting) - sum(first) > copies - stage.backward


def test_the_search_offloads_as_few_blocks_as_fit_and_only_where_nothing_else_does() -> None:
    whole = search_of(JOB).price(PLAIN).memory.peak_bytes / 2**30
    (best,) = BestLayouts(search_of(JOB, gib=whole - 4), PINS).ranked()
    blocks = best.layout.offloaded_layers(OLMOE)
    assert 0 < blocks < 16
    assert best.memory.peak_bytes <= (whole - 4) * 2**30
    fewer = replace(best.layout, offload_activations=(blocks - 1) / 16)
    assert search_of(JOB).price(fewer).memory.peak_bytes > (whole - 4) * 2**30
    assert (
        BestLayouts(search_of(JOB, gib=whole + 1), PINS).ranked()[0].layout.offload_activations == 0
    )
    recomputed = BestLayouts(search_of(JOB, gib=whole - 4), replace(PINS, recompute=None)).ranked()[
        0
    ]
    assert recomputed.step.seconds <= best.step.seconds


def test_a_pinned_share_that_the_host_has_no_room_for_is_priced_and_refused() -> None:
    hardware = {**H100.fingerprint.hardware, "host_memory_bytes": str(2**30)}
    machine = replace(H100, fingerprint=replace(H100.fingerprint, hardware=hardware))
    request = TrainingRequest(
        job=JOB, pins=replace(PINS, offload_activations=0.5), target=find_target("megatron")
    )
    with pytest.raises(LayoutTooLargeError, match="host memory binds") as caught:
        plan_training(request, machine)
    assert caught.value.exit_code == 3
    plan = plan_training(request, H100)
    assert plan.best.layout.offload_activations == 0.5
    assert plan.fits


@pytest.mark.parametrize(
    ("target", "pins", "what"),
    [
        ("megatron", {"pp": 2}, "offloaded activations with pp 2"),
        ("megatron", {"recompute": ("moe_act",)}, "with recomputation"),
        ("megatron", {"ep": 8, "overlap": "batch"}, "with overlap batch"),
        ("megatron", {"cuda_graphs": "partial"}, "with CUDA graphs"),
        ("torchtitan", {}, "cannot run offloaded activations"),
        ("moetune", {}, "cannot run offloaded activations"),
    ],
)
def test_what_a_runtime_cannot_offload_with_is_refused_by_name(
    target: str, pins: dict[str, object], what: str
) -> None:
    wanted = LayoutRequest(offload_activations=0.5, **pins)  # type: ignore[arg-type]
    with pytest.raises((InputError, RefusedLayoutError), match=what):
        BestLayouts(search_of(JOB, target=target), wanted).ranked()


def test_a_share_of_the_optimizer_moves_its_bytes_and_its_time_to_the_host() -> None:
    search = search_of(JOB)
    plain, half, whole = (
        search.price(replace(PLAIN, offload_optimizer=share)) for share in (0.0, 0.5, 1.0)
    )
    states = plain.memory.parts["optimizer"]
    assert half.memory.parts["optimizer"] == states / 2
    assert whole.memory.parts["optimizer"] == 0
    parameters = states / 12
    assert whole.memory.host_bytes == pytest.approx(18 * parameters)
    assert half.memory.host_bytes == pytest.approx(9 * parameters)
    seconds = [priced.step.parts["optimizer"] for priced in (plain, half, whole)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
    assert seconds[2] == pytest.approx(1.5e-9 * parameters, rel=0.01)
    others = {name: value for name, value in plain.step.parts.items() if name != "optimizer"}
    assert {name: whole.step.parts[name] for name in others} == others


@pytest.mark.parametrize(
    ("share", "added"), [(0.25, 0.875), (0.5, 1.488), (0.75, 2.191), (1, 2.881)]
)
def test_what_qwen3_takes_longer_on_16_h100_is_what_was_published(
    share: float, added: float
) -> None:
    """Megatron-Bridge's own five runs of Qwen3-30B, tp 2, pp 2, ep 4; all but the last of them
    wait for the copies, too."""
    job = TrainingJob(
        decoder=named_model("qwen3-30b-a3b").decoder, world_size=16, global_batch=8, length=4096
    )
    layout = FoldedLayout(dp=4, tp=2, pp=2, ep=4)
    search = search_of(job)
    seconds = [
        search.price(replace(layout, offload_optimizer=part)).step.seconds for part in (0.0, share)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(added, rel=0.2 if share < 0.5 else 0.07)


def test_the_search_puts_as_little_of_the_optimizer_on_the_host_as_fits() -> None:
    pins = replace(PINS, offload_activations=0.0)
    whole = search_of(JOB).price(PLAIN).memory.peak_bytes / 2**30
    states = search_of(JOB).price(PLAIN).memory.parts["optimizer"] / 2**30
    (best,) = BestLayouts(search_of(JOB, gib=whole - states * 0.3), pins).ranked()
    assert best.layout.offload_optimizer == 0.5
    assert (
        BestLayouts(search_of(JOB, gib=whole + 0.1), pins).ranked()[0].layout.offload_optimizer == 0
    )
    (pinned,) = BestLayouts(
        search_of(JOB, gib=whole + 0.1), replace(pins, offload_optimizer=0.75)
    ).ranked()
    assert pinned.layout.offload_optimizer == 0.75
    tight = search_of(JOB, gib=whole - states * 0.5)
    (pinned,) = BestLayouts(tight, replace(pins, offload_optimizer=0.25)).ranked()
    assert pinned.layout.offload_optimizer == 0.25
    assert pinned.memory.peak_bytes > tight.limit_bytes, "a pinned share is not made larger"
    nothing = search_of(JOB, gib=whole - 1.1 * states)  # the states' fragments go with them
    (small,) = BestLayouts(nothing, pins).ranked()
    assert small.layout.offload_optimizer == 0, "nothing fits: the answer is the plain layout"
    assert small.memory.peak_bytes > nothing.limit_bytes


@pytest.mark.parametrize(
    ("target", "pins", "changes", "what"),
    [
        ("torchtitan", {"zero": 2}, {}, "torchtitan .* cannot run an offloaded optimizer"),
        ("moetune", {}, {}, "cannot run states in host memory with ZeRO stage 1"),
        ("moetune", {"zero": 3}, {}, "cannot run a share of 0.5 of the states"),
        ("moetune", {"offload_optimizer": 1.0, "zero": 3, "tp": 2}, {}, "with tp 2"),
        ("megatron", {"zero": 3}, {}, "an offloaded optimizer with ZeRO stage 3"),
        ("megatron", {}, {"optimizer": "adam-bf16"}, "with the optimizer adam-bf16"),
        ("megatron", {}, {"dtype": "fp8"}, "and fp8"),
        ("megatron", {"offload_optimizer": 1.5}, {}, "1.5 is no share"),
    ],
)
def test_what_no_host_can_do_is_refused_by_name(
    target: str, pins: dict[str, object], changes: dict[str, object], what: str
) -> None:
    wanted = LayoutRequest(**{"offload_optimizer": 0.5, **pins})  # type: ignore[arg-type]
    job = replace(JOB, **changes)  # type: ignore[arg-type] # fields by name, of several types
    with pytest.raises((InputError, RefusedLayoutError), match=what):
        BestLayouts(search_of(job, target=target), wanted).ranked()


def test_a_host_whose_memory_nobody_knows_is_asked_for() -> None:
    hardware = {"nics": "8"}
    machine = replace(H100, fingerprint=replace(H100.fingerprint, hardware=hardware))
    request = TrainingRequest(
        job=JOB, pins=replace(PINS, offload_activations=0.5), target=find_target("megatron")
    )
    plan = plan_training(request, machine)
    each = plan.best.memory.host_bytes
    needed = format_bytes(each * min(8, JOB.world_size))
    words = f"each host needs {needed} more than its system's"
    assert any(words in warning for warning in plan.warnings)
    assert not any("each host" in warning for warning in plan_training(request, H100).warnings)
