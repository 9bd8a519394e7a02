"""What a step shows of gradients and parameters, against sums by hand."""

import itertools
from dataclasses import replace

import pytest

from moetune.domain.costs import Costs
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, Recompute, ZeroStage
from moetune.fit.speeds import BANDWIDTH, START, Slowdown, slowed
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import NO_ROOM, WITHOUT_END, Room
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.step import StepPrices
from tests.solve.model.test_prices import device, job_of

JOB = job_of("mixtral-8x7b")
WIDTH, HIDDEN, KEYS, BLOCKS, EXPERTS, WORDS = 4096, 14336, 1024, 32, 8, 32000
PLAIN = FoldedLayout(dp=64, ep=8, micro_batch=1, zero=1)


def prices_of(target: str = "moetune") -> StepPrices:
    return StepPrices(
        job=JOB, device=device(), stages=DecoderStages(JOB.decoder), target=find_target(target)
    )


def device_of(target: str) -> DevicePrices:
    """Prices of a runtime's kernels."""
    return prices_of(target).device


def by_hand(layout: FoldedLayout) -> tuple[float, float]:
    """Return the seconds that reducing and gathering all parameters take."""
    block = 2 * WIDTH * (WIDTH + KEYS) + 2 * WIDTH + EXPERTS * WIDTH
    expert = 3 * WIDTH * HIDDEN * EXPERTS // layout.ep
    counts = BLOCKS * block + 2 * WORDS * WIDTH, BLOCKS * expert  # the last norm is not counted
    spans = device().span(layout.dp, 1), device().span(layout.edp, layout.ep)
    pairs = list(zip(counts, spans, strict=True))
    send = device().collective
    return (
        sum(send("reduce_scatter", span, 4 * count) for count, span in pairs),
        sum(send("all_gather", span, 2 * count / span.size) for count, span in pairs),
    )


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("room", [NO_ROOM, WITHOUT_END])
def test_moetune_shows_all_of_a_step_and_with_zero_3_of_every_micro_batch(
    zero: ZeroStage, room: Room
) -> None:
    layout, (reduce, gather) = replace(PLAIN, zero=zero), by_hand(PLAIN)
    num = JOB.micro_batches(layout)
    wanted = num * (reduce + 2 * gather) if zero == 3 else reduce + gather
    exposed = prices_of().exposed_seconds(layout, room)
    assert exposed == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 3.0])
def test_one_block_ahead_hides_what_fits_next_to_its_neighbour(target: str, share: float) -> None:
    """Against a walk over the blocks: the link and the device, each with one block at a time."""
    layout, (reduce, gather) = replace(PLAIN, zero=3), by_hand(PLAIN)
    room = Room(share * gather, share * (gather + reduce))
    gather, reduce = gather / BLOCKS, reduce / BLOCKS
    walked = 0.0
    for computed, sent, behind in (
        (room.forward / BLOCKS, gather, 0.0), (room.backward / BLOCKS, gather + reduce, reduce),
    ):  # fmt: skip
        clock = gather  # the first block's parameters
        for _ in range(BLOCKS - 1):
            clock += max(computed, sent)
        walked += clock + computed + behind
    shown = walked - room.forward - room.backward
    priced = prices_of(target).exposed_seconds(layout, room) / JOB.micro_batches(layout)
    copied = (
        14 * sum(prices_of(target)._most_parameters(layout)[0]) if target == "torchtitan" else 0
    )
    assert priced == pytest.approx(
        shown + device_of(target).memory_seconds(copied, kernels=0), rel=1e-3
    )


def test_gathers_share_the_link_of_exchanges_between_nodes_or_inside_them() -> None:
    update = prices_of("megatron")
    across, inside = replace(PLAIN, zero=3, ep=64), replace(PLAIN, zero=3, ep=8)
    assert update.shares_link(across)
    assert not update.shares_link(inside)
    assert not update.shares_link(replace(across, zero=1))
    alone = replace(inside, ep=1)
    assert not update.shares_link(alone)


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("recompute", [(), ("moe",), ("full",)])
def test_room_is_what_passes_compute(recompute: tuple[Recompute, ...], micro_batch: int) -> None:
    """Beside one rank with all of the model, whose passes without exchanges are known."""
    prices = prices_of("megatron")
    layout = replace(PLAIN, dp=8, zero=3, recompute=recompute, micro_batch=micro_batch)
    blocks = prices.blocks.seconds(layout)
    [stage] = prices.pipeline(layout).stages
    (exchanges,) = [block.times.communication for block in blocks]
    sent, back = BLOCKS * exchanges.forward, BLOCKS * exchanges.backward
    again = sent if recompute else 0.0
    room = Room(stage.forward - sent, stage.backward - back - again)
    wanted = prices.exposed_seconds(layout, room)
    assert prices.gradients(layout, prices.pipeline(layout)) == pytest.approx(wanted)
    assert wanted < prices.exposed_seconds(layout, NO_ROOM)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "moetune"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.05, 1.0, 4.0])
def test_what_collectives_bind_is_what_the_step_follows_them_by(
    target: str, zero: ZeroStage, factor: float
) -> None:
    def prices(more: float) -> StepPrices:
        costs: Costs = device().costs
        for op, part in itertools.product(("reduce_scatter", "all_gather"), (BANDWIDTH, START)):
            costs = slowed(costs, Slowdown(part=f"{op} {part}", factor=factor * more))
        return replace(prices_of(target), device=replace(device_of(target), costs=costs))

    layout = replace(PLAIN, zero=zero, ep=1)
    step, copied = prices(1.0).step(layout), prices(0.0).step(layout).parts["gradients"]
    follows = (prices(1 + 1e-4).step(layout).seconds - step.seconds) / 1e-4
    alone = step.parts["gradients"] - copied
    assert alone + step.bound_by_replicas == pytest.approx(follows, rel=1e-3, abs=1e-6)
    assert (step.bound_by_replicas > 0) == (follows > alone * (1 + 1e-3))
