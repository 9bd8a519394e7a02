"""The predicted step of a training plan as a Chrome trace (`moetune trace`).

Each pipeline rank is a process with its passes, in the order of its schedule; behind them one block
of the model is another one, with its modules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moetune.domain.layer import Phase
from moetune.domain.profile import Profile
from moetune.domain.recorded_layers import alike
from moetune.domain.samples import ResourceClass
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingDocument
from moetune.solve.layer.timeline import COMPUTE, LINK, Timeline
from moetune.solve.trace import TraceEvent, TraceSpan, process_events
from moetune.solve.training.block_timeline import block_timeline
from moetune.solve.training.pipeline import PassSpan, pass_spans
from moetune.solve.training.schedule import PASS_WORDS
from moetune.solve.training.step import StepPrices
from moetune.workflows.planned_training import read_planned_training
from moetune.workflows.trace import Trace
from moetune.workflows.training_sensitivity import TrainingSubject

_MOST_PASSES = 20_000
"""Perfetto opens that many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step of a layout.

    Args:
        passes: of the first micro-batches, of each pipeline rank.
        num_shown: those micro-batches, of `num_micro_batches`.
        block: what the block in the trace is.
        forward, backward: passes of that block.
    """

    passes: tuple[PassSpan, ...]
    num_shown: int
    num_micro_batches: int
    block: str
    forward: Timeline
    backward: Timeline

    @classmethod
    def of(cls, prices: StepPrices, layout: FoldedLayout) -> "_Step":
        """Return a layout's step: whole rounds of the ranks, and the rest of a round."""
        pipeline = prices.pipeline(layout)
        num, pp = pipeline.num_micro_batches, pipeline.pp
        rounds = _MOST_PASSES // (2 * len(pipeline.stages)) // pp
        shown = min(num, max(1, rounds) * pp + num % pp)
        block, forward, backward = _modules(prices, layout)
        return cls(
            passes=pass_spans(pipeline, shown), num_shown=shown, num_micro_batches=num,
            block=block, forward=forward, backward=backward,
        )  # fmt: skip


def training_trace(plan: TrainingDocument, *, profile: Profile, model: str | None = None) -> Trace:
    """Return the passes of every pipeline rank, then one block of the model.

    Args:
        profile, model: as of `read_planned_training`.

    Raises:
        InputError: this version of moetune predicts another step for the plan's layout.
    """
    planned = read_planned_training(plan, profile=profile, model=model)
    prices, layout = TrainingSubject(planned=planned).prices, planned.layouts[0]
    step = _Step.of(prices, layout)
    tokens = layout.micro_batch * planned.request.job.length // layout.cp
    parts = prices.step(layout).parts
    events: list[TraceEvent] = []
    for rank in range(layout.pp):
        own = (one for one in step.passes if one.rank == rank)
        spans = [_pass(one, tokens) for one in own]
        if step.num_shown == step.num_micro_batches:
            spans += _rest(step, parts)
        events += process_events(f"predicted, pipeline rank {rank}", spans, number=rank)
    block = [*_block(step, layout, tokens)]
    events += process_events(f"predicted, {step.block}", block, number=layout.pp)
    return Trace(events=tuple(events), predicted=None, measured=None, notes=tuple(_notes(step)))


def _pass(one: PassSpan, tokens: int) -> TraceSpan:
    return TraceSpan(
        f"{PASS_WORDS[one.kind]} {one.batch + 1}", "comp", COMPUTE, one.start_seconds,
        one.end_seconds, {"micro_batch": one.batch + 1, "stage": one.stage + 1, "tokens": tokens},
    )  # fmt: skip


def _rest(step: _Step, parts: Mapping[str, float]) -> Iterator[TraceSpan]:
    """Yield what comes behind the last pass of all ranks."""
    at = max(one.end_seconds for one in step.passes)
    behind: tuple[tuple[str, ResourceClass, str], ...] = (
        ("gradients", "comm", LINK), ("optimizer", "comp", COMPUTE),
    )  # fmt: skip
    for name, resource, track in behind:
        end = at + parts[name]
        yield TraceSpan(name, resource, track, at, end, {})
        at = end


def _block(step: _Step, layout: FoldedLayout, tokens: int) -> Iterator[TraceSpan]:
    """Yield the modules of both passes of the block, backward last."""
    start = 0.0
    passes: tuple[tuple[Phase, Timeline], ...] = (
        ("forward", step.forward), ("backward", step.backward),
    )  # fmt: skip
    for phase, timeline in passes:
        for span in timeline.spans:
            yield TraceSpan(
                f"{phase} {span.name}", span.resource, span.stream, start + span.start_seconds,
                start + span.end_seconds, {"tokens": tokens // layout.tp},
            )  # fmt: skip
        start += timeline.makespan_seconds


def _notes(step: _Step) -> Iterator[str]:
    if step.num_shown < step.num_micro_batches:
        yield (
            f"Passes of the first {step.num_shown:,} of {step.num_micro_batches:,} micro-batches."
        )


def _modules(prices: StepPrices, layout: FoldedLayout) -> tuple[str, Timeline, Timeline]:
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
