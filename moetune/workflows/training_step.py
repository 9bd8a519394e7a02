"""The step of a layout as bars: the passes of its pipeline, and one block of its model."""

from dataclasses import dataclass

from moetune.domain.recorded_layers import alike
from moetune.domain.training import FoldedLayout
from moetune.solve.layer.timeline import Timeline
from moetune.solve.training.block_timeline import block_timeline
from moetune.solve.training.pipeline import PassSpan, pass_spans
from moetune.solve.training.step import StepPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """A step of a layout.

    Args:
        passes: of the first micro-batches, of each pipeline rank.
        num_shown: those micro-batches, of `num_micro_batches`.
        block: what the drawn block is.
        forward, backward: passes of that block.
    """

    passes: tuple[PassSpan, ...]
    num_shown: int
    num_micro_batches: int
    block: str
    forward: Timeline
    backward: Timeline


def draw_step(prices: StepPrices, layout: FoldedLayout, *, most_passes: int) -> DrawnStep:
    """Return a layout's step.

    Args:
        most_passes: about as many are drawn at most, of all ranks.
    """
    pipeline = prices.pipeline(layout)
    num = pipeline.num_micro_batches
    shown = _few(num, pipeline.pp, most_passes // (2 * len(pipeline.stages)))
    block, forward, backward = _block(prices, layout)
    return DrawnStep(
        passes=pass_spans(pipeline, shown), num_shown=shown, num_micro_batches=num,
        block=block, forward=forward, backward=backward,
    )  # fmt: skip


def _few(num: int, pp: int, most: int) -> int:
    """Return about so many micro-batches: whole rounds of the ranks, and the rest of a round."""
    return min(num, max(1, most // pp) * pp + num % pp)


def _block(prices: StepPrices, layout: FoldedLayout) -> tuple[str, Timeline, Timeline]:
    """Return the kind of block that the model has most of, those with experts first.

    Of blocks that differ in their recorded routing alone it is the first.
    """
    decoder = prices.job.decoder
    plain = alike(decoder)
    kind = max(plain.kinds, key=lambda one: (one.routed is not None, plain.blocks.count(one)))
    first = decoder.blocks[plain.blocks.index(kind)]
    at, num = decoder.kinds.index(first), plain.blocks.count(kind)
    has = "with experts" if kind.routed is not None else "without experts"
    words = f"a block {has}, one of {num} alike among {decoder.num_layers}"
    if decoder.blocks.count(first) < num:
        words = f"a block {has}, the first of {num} alike but for their routing"
    times, seconds = prices.blocks.times(layout)[at], prices.blocks.seconds(layout)[at]
    return words, *block_timeline(times, seconds)
