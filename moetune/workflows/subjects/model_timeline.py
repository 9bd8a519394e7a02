"""A training plan's step over time: each pipeline rank's passes."""

from collections.abc import Iterator

from moetune.domain.samples import ResourceClass
from moetune.domain.training import FoldedLayout
from moetune.solve.layer.timeline import COMPUTE, LINK
from moetune.solve.trace import TraceSpan
from moetune.solve.training.pipeline import PassSpan, pass_spans
from moetune.solve.training.schedule import PASS_WORDS
from moetune.solve.training.step import StepPrices
from moetune.workflows.subjects.values import Timelines

_MOST_PASSES = 20_000
"""Perfetto opens that many at once."""


def model_timelines(prices: StepPrices, layout: FoldedLayout) -> Timelines:
    """Return each pipeline rank's passes in the order of its schedule.

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
    ranks = [
        (
            f"predicted, pipeline rank {rank}",
            [*(_pass(span, tokens) for span in passes if span.rank == rank), *behind],
        )
        for rank in range(layout.pp)
    ]
    cut = f"Passes of the first {shown:,} of {num:,} micro-batches."
    return Timelines(ranks, notes=(cut,) if shown < num else ())


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
