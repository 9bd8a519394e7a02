"""A training plan's step over time: each pipeline rank's passes, and one block of the model."""

from collections.abc import Iterator

from moetune.domain.layer import Phase
from moetune.domain.recorded_layers import alike
from moetune.domain.samples import ResourceClass
from moetune.domain.training import FoldedLayout
from moetune.solve.layer.timeline import COMPUTE, LINK, Timeline
from moetune.solve.trace import TraceSpan
from moetune.solve.training.block_timeline import block_timeline
from moetune.solve.training.pipeline import PassSpan, pass_spans
from moetune.solve.training.schedule import PASS_WORDS
from moetune.solve.training.step import StepPrices
from moetune.workflows.subjects.values import Timelines

_MOST_PASSES = 20_000
"""Perfetto opens that many at once."""


def model_timelines(prices: StepPrices, layout: FoldedLayout) -> Timelines:
    """Return each pipeline rank's passes in the order of its schedule, then one block's modules.

    Of long steps these are the first whole rounds of the ranks, and the rest of a round.
    """
    pipeline = prices.pipeline(layout)
    num, pp = pipeline.num_micro_batches, pipeline.pp
    rounds = _MOST_PASSES // (2 * len(pipeline.stages)) // pp
    shown = min(num, max(1, rounds) * pp + num % pp)
    tokens = layout.micro_batch * prices.job.length // layout.cp
    passes = pass_spans(pipeline, shown)
    end = max(span.end_seconds for span in passes)
    behind = [*_behind(prices, layout, end)] if shown == num else []
    ranks = (
        (
            f"predicted, pipeline rank {rank}",
            [*(_pass(span, tokens) for span in passes if span.rank == rank), *behind],
        )
        for rank in range(layout.pp)
    )
    name, forward, backward = _block(prices, layout)
    block = f"predicted, {name}", [*_modules(forward, backward, tokens // layout.tp)]
    cut = f"Passes of the first {shown:,} of {num:,} micro-batches."
    return Timelines(processes=(*ranks, block), notes=(cut,) if shown < num else ())


def _pass(span: PassSpan, tokens: int) -> TraceSpan:
    return TraceSpan(
        f"{PASS_WORDS[span.kind]} {span.batch + 1}", "comp", COMPUTE, span.start_seconds,
        span.end_seconds,
        {"micro_batch": span.batch + 1, "stage": span.stage + 1, "tokens": tokens},
    )  # fmt: skip


def _behind(prices: StepPrices, layout: FoldedLayout, start: float) -> Iterator[TraceSpan]:
    """Yield what comes behind the last pass of all ranks."""
    parts = prices.step(layout).parts
    names: tuple[tuple[str, ResourceClass, str], ...] = (
        ("gradients", "comm", LINK), ("optimizer", "comp", COMPUTE),
    )  # fmt: skip
    for name, resource, track in names:
        yield TraceSpan(name, resource, track, start, start + parts[name], {})
        start += parts[name]


def _modules(forward: Timeline, backward: Timeline, tokens: int) -> Iterator[TraceSpan]:
    """Yield the modules of both passes of a block, backward last."""
    start = 0.0
    passes: tuple[tuple[Phase, Timeline], ...] = (("forward", forward), ("backward", backward))
    for phase, timeline in passes:
        for span in timeline.spans:
            yield TraceSpan(
                f"{phase} {span.name}", span.resource, span.stream, start + span.start_seconds,
                start + span.end_seconds, {"tokens": tokens},
            )  # fmt: skip
        start += timeline.makespan_seconds


def _block(prices: StepPrices, layout: FoldedLayout) -> tuple[str, Timeline, Timeline]:
    """Return the kind of block that the model has most of, those with experts first.

    Of blocks that differ in their recorded routing alone it is the first.
    """
    decoder = prices.job.decoder
    plain = alike(decoder)
    kind = max(plain.kinds, key=lambda kind: (kind.routed is not None, plain.blocks.count(kind)))
    first = decoder.blocks[plain.blocks.index(kind)]
    index, num = decoder.kinds.index(first), plain.blocks.count(kind)
    words = f"a block {'with' if kind.routed is not None else 'without'} experts, "
    if decoder.blocks.count(first) < num:
        words += f"the first of {num} alike but for their routing"
    else:
        words += f"one of {num} alike among {decoder.num_layers}"
    times, seconds = prices.blocks.times(layout)[index], prices.blocks.seconds(layout)[index]
    return words, *block_timeline(times, seconds)
