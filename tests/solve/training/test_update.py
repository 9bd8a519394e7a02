"""What a step shows of moetune's gradients and parameters, against sums by hand."""

import itertools
import math
from dataclasses import replace

import pytest

from moetune.domain.costs import Costs
from moetune.domain.pipeline import Schedule
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, Recompute, ZeroStage
from moetune.fit.slowed import BANDWIDTH, START, Slowdown, slowed
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.room import NO_ROOM, WITHOUT_END, Room
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from tests.solve.training.test_prices import device, job_of

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


def by_hand(layout: FoldedLayout) -> dict[str, float]:
    """Seconds that collectives take: of all parameters, and of the first block with embedding."""
    block = 2 * WIDTH * (WIDTH + KEYS) + 2 * WIDTH + EXPERTS * WIDTH
    expert = 3 * WIDTH * HIDDEN * EXPERTS // layout.ep
    # The last norm is not counted.
    counts = {
        "all": (BLOCKS * block + 2 * WORDS * WIDTH, BLOCKS * expert),
        "first": (block + WORDS * WIDTH, expert),
    }
    spans = device().span(layout.dp, 1), device().span(layout.edp, layout.ep)
    found = {}
    for name, pair in counts.items():
        found[f"reduce {name}"] = sum(
            device().collective("reduce_scatter", span, 4 * count)
            for count, span in zip(pair, spans, strict=True)
        )
        found[f"gather {name}"] = sum(
            device().collective("all_gather", span, 2 * count / span.size)
            for count, span in zip(pair, spans, strict=True)
        )
    return found


def test_with_room_the_first_blocks_bucket_shows_and_without_it_all() -> None:
    update, hand = prices_of().update, by_hand(PLAIN)
    least = update.gradients(PLAIN, WITHOUT_END, num_micro_batches=4)
    assert least == pytest.approx(hand["reduce first"] + hand["gather first"], rel=1e-3)
    most = update.gradients(PLAIN, NO_ROOM, num_micro_batches=4)
    assert most == pytest.approx(hand["reduce all"] + hand["gather all"], rel=1e-3)
    assert least == update.least_of_gradients(PLAIN)
    room = Room(forward=0.1 * hand["gather all"], backward=0.2 * hand["reduce all"])
    some = update.gradients(PLAIN, room, num_micro_batches=4)
    others = 1 - 1 / BLOCKS  # a bucket's blocks run before it is made, or behind all
    assert some == pytest.approx(most - others * (room.forward + room.backward))


def test_without_zero_all_is_behind_and_nothing_ahead() -> None:
    update, whole = prices_of().update, replace(PLAIN, zero=0)
    hand = by_hand(whole)
    behind = Room(forward=1.0, backward=0.0)
    assert update.gradients(whole, behind, num_micro_batches=4) == pytest.approx(
        hand["reduce all"] + hand["gather all"], rel=1e-3
    )
    assert update.gradients(whole, WITHOUT_END, num_micro_batches=4) == pytest.approx(
        hand["reduce first"] + hand["gather first"], rel=1e-3
    )


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v", "dualpipe_v"])
def test_split_passes_show_all_gradients_and_hide_parameters(schedule: Schedule) -> None:
    layout = replace(PLAIN, dp=32, pp=2, vpp=2, schedule=schedule)
    update = prices_of().update
    passes = Room(forward=math.inf, backward=0.0)
    hidden = update.gradients(layout, WITHOUT_END, num_micro_batches=4)
    assert hidden == update.gradients(layout, passes, num_micro_batches=4)
    assert hidden < update.gradients(layout, NO_ROOM, num_micro_batches=4)
    whole = replace(layout, schedule="interleaved")
    found = update.gradients(whole, WITHOUT_END, num_micro_batches=4)
    assert found < update.gradients(whole, passes, num_micro_batches=4)


def test_zero_3_shows_all_of_every_micro_batch() -> None:
    layout = replace(PLAIN, zero=3)
    hand = by_hand(layout)
    wanted = 4 * (hand["reduce all"] + 2 * hand["gather all"])
    found = prices_of().update.gradients(layout, WITHOUT_END, num_micro_batches=4)
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 3.0])
def test_one_block_ahead_hides_what_fits_beside_its_neighbour(target: str, share: float) -> None:
    """Against a walk over the blocks: the link and the device, each with one block at a time."""
    layout, hand = replace(PLAIN, zero=3), by_hand(PLAIN)
    gather, reduce = hand["gather all"] / BLOCKS, hand["reduce all"] / BLOCKS
    room = Room(share * hand["gather all"], share * (hand["gather all"] + hand["reduce all"]))
    walked = 0.0
    for computed, sent, behind in (
        (room.forward / BLOCKS, gather, 0.0), (room.backward / BLOCKS, gather + reduce, reduce),
    ):  # fmt: skip
        clock = gather  # the first block's parameters
        for _ in range(BLOCKS - 1):
            clock += max(computed, sent)
        walked += clock + computed + behind
    shown = walked - room.forward - room.backward
    priced = prices_of(target).update.gradients(layout, room, num_micro_batches=1)
    copied = (
        14 * sum(count for count in prices_of(target).update._most_parameters(layout)[:2])
        if target == "torchtitan"
        else 0
    )
    assert priced == pytest.approx(shown + device_of(target).moved(copied, kernels=0), rel=1e-3)


def test_gathers_share_the_link_of_exchanges_between_nodes_or_inside_them() -> None:
    update = prices_of("megatron").update
    across, inside = replace(PLAIN, zero=3, ep=64), replace(PLAIN, zero=3, ep=8)
    assert update.shares_link(across)
    assert not update.shares_link(inside)
    assert not update.shares_link(replace(across, zero=1))
    alone = replace(inside, ep=1)
    assert not update.shares_link(alone)


def test_exchanges_take_turns_with_parameters_and_gradients_wait_for_them() -> None:
    update, hand = prices_of().update, by_hand(PLAIN)
    seconds, first = hand["gather all"], hand["gather first"]
    alone = update.gradients(PLAIN, Room(seconds * 3, 0.0), num_micro_batches=4)
    half = Room(seconds * 3, 0.0, exchanged=seconds * 3)
    shown = update.gradients(PLAIN, half, num_micro_batches=4) - alone
    assert shown == pytest.approx((seconds - first) / 2, rel=1e-3)
    behind = Room(0.0, seconds, exchanged=seconds)
    found = update.gradients(PLAIN, behind, num_micro_batches=4)
    assert found == update.gradients(PLAIN, Room(0.0, seconds), num_micro_batches=4)


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("recompute", [(), ("moe",), ("full",)])
def test_room_is_what_passes_compute(recompute: tuple[Recompute, ...], micro_batch: int) -> None:
    """Beside one rank with all of the model, whose passes without exchanges are known."""
    prices = prices_of()
    layout = replace(PLAIN, recompute=recompute, micro_batch=micro_batch)
    blocks = prices.blocks.seconds(layout)
    [stage] = prices.pipeline(layout).stages
    sent = sum(
        count * one.times.communication.forward
        for count, one in zip((BLOCKS,), blocks, strict=True)
    )
    back = sum(
        count * one.times.communication.backward
        for count, one in zip((BLOCKS,), blocks, strict=True)
    )
    again = sent if recompute else 0.0
    room = Room(stage.forward - sent, stage.backward - back - again, sent)
    wanted = prices.update.gradients(layout, room, num_micro_batches=4)
    assert prices.gradients(layout, prices.pipeline(layout)) == pytest.approx(wanted)
    assert wanted < prices.update.gradients(layout, NO_ROOM, num_micro_batches=4)


def test_other_runtimes_hide_as_far_as_passes_are_long() -> None:
    update = prices_of("megatron").update
    assert update.least_of_gradients(PLAIN) == 0.0
    hand = by_hand(PLAIN)
    assert update.gradients(PLAIN, NO_ROOM, num_micro_batches=4) == pytest.approx(
        hand["reduce all"] + hand["gather all"], rel=1e-3
    )


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
