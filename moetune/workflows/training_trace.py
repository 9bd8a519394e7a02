"""The predicted step of a training plan as a Chrome trace (`moetune trace`).

Each pipeline rank is a process with its passes, in the order of its schedule; behind them one block
of the model is another one, with its modules.
"""

from collections.abc import Iterator, Mapping

from moetune.domain.layer import Phase
from moetune.domain.profile import Profile
from moetune.domain.samples import ResourceClass
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingDocument
from moetune.solve.layer.timeline import COMPUTE, LINK, Timeline
from moetune.solve.trace import TraceEvent, TraceSpan, process_events
from moetune.solve.training.pipeline import PassSpan
from moetune.solve.training.schedule import PASS_WORDS
from moetune.workflows.planned_training import read_planned_training
from moetune.workflows.trace import Trace
from moetune.workflows.training_sensitivity import TrainingSubject
from moetune.workflows.training_step import DrawnStep, draw_step

_MOST_PASSES = 20_000
"""Perfetto opens that many at once."""


def training_trace(plan: TrainingDocument, *, profile: Profile, model: str | None = None) -> Trace:
    """Return the passes of every pipeline rank, then one block of the model.

    Args:
        profile, model: as of `read_planned_training`.

    Raises:
        InputError: this version of moetune predicts another step for the plan's layout.
    """
    planned = read_planned_training(plan, profile=profile, model=model)
    prices, layout = TrainingSubject(planned=planned).prices, planned.layouts[0]
    step = draw_step(prices, layout, most_passes=_MOST_PASSES)
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


def _rest(step: DrawnStep, parts: Mapping[str, float]) -> Iterator[TraceSpan]:
    """Yield what comes behind the last pass of all ranks."""
    at = max(one.end_seconds for one in step.passes)
    behind: tuple[tuple[str, ResourceClass, str], ...] = (
        ("gradients", "comm", LINK), ("optimizer", "comp", COMPUTE),
    )  # fmt: skip
    for name, resource, track in behind:
        end = at + parts[name]
        yield TraceSpan(name, resource, track, at, end, {})
        at = end


def _block(step: DrawnStep, layout: FoldedLayout, tokens: int) -> Iterator[TraceSpan]:
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


def _notes(step: DrawnStep) -> Iterator[str]:
    if step.num_shown < step.num_micro_batches:
        yield (
            f"Passes of the first {step.num_shown:,} of {step.num_micro_batches:,} micro-batches."
        )
