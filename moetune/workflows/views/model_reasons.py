"""Reasons of a training plan's layout: what binds, the parts of its step, and its memory.

Everything is in the plan's own document, so that no profile is needed.
"""

from collections.abc import Iterator

from moetune.domain.placement import LayerPlacement
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.report.section import Cell, Section, Table, percent
from moetune.solve.joint.pins import pin_flag, pinned
from moetune.solve.joint.search import NOISE
from moetune.workflows.subjects.model import ModelSubject
from moetune.workflows.views.decision import how_sure_of_training
from moetune.workflows.views.first_words import binding_words, saving_words
from moetune.workflows.views.reasons import Reasons
from moetune.workflows.views.training import time_table
from moetune.workflows.views.words import largest_first, model_placement_words

_TIES = f"Of steps within {percent(NOISE, digits=0)} of each other the simpler layout is taken."
_MEAN = "Parts are compared on the mean of the pipeline ranks."


def model_reasons(subject: ModelSubject, *, is_drawn: bool) -> Reasons:  # noqa: ARG001 - its page has its own
    """Return what an explanation shows of a training plan."""
    plan, best, inputs = subject.plan, subject.plan.best, subject.plan.inputs
    flags = (pin_flag(inputs.pins, name).partition(" ") for name in pinned(inputs.pins))
    layouts = (best, *plan.alternatives)
    is_piped = any(row.layout.pp > 1 for row in layouts)
    is_tied = any(row.predicted.step_seconds < best.predicted.step_seconds for row in layouts)
    return Reasons(
        title=f"{inputs.model}: {best.words}",
        scope=(
            f"{inputs.world_size:,} ranks · {inputs.global_batch:,} sequences of {inputs.seq:,} "
            f"tokens · {inputs.dtype}"
        ),
        words=tuple(model_placement_words(plan)),
        why=(binding_words(best), *_saved(best), *_beside(best), *saving_words(plan)),
        sure=how_sure_of_training(plan),
        pins=tuple((flag, value) for flag, _, value in flags),
        terms=(_time(subject), _memory(subject), *_placement(plan)),
        notes=(*((_MEAN,) if is_piped else ()), *((_TIES,) if is_tied else ())),
    )


def _time(subject: ModelSubject) -> Section:
    best = subject.plan.best
    step = best.predicted.step_seconds
    kinds = (f"{name} {percent(seconds / step)}" for name, seconds in subject.kinds.items())
    return Section(
        name="terms", title="What the time consists of",
        paragraphs=(f"Of the step: {', '.join(kinds)}.",), tables=(time_table(best),),
    )  # fmt: skip


def _memory(subject: ModelSubject) -> Section:
    memory, limit = subject.plan.memory, subject.memory_limit_bytes
    rows = largest_first(memory.parts)
    return Section(
        name="memory",
        title=f"Memory of a device: {Cell.size(memory.peak_bytes).text} of {Cell.size(limit).text}",
        tables=(
            Table(
                name="memory",
                header=("part", "memory"),
                rows=tuple((Cell.words(name), Cell.size(round(size))) for name, size in rows),
            ),
        ),
    )


def _placement(plan: TrainingDocument) -> Iterator[Section]:
    """Yield how full the fullest rank of each layer is."""
    if plan.placement is None:
        return
    yield Section(
        name="placement",
        title="Rows of the fullest rank over the mean",
        tables=(
            Table(
                name="placement",
                header=("layer of experts", "own order", "placed", "at least"),
                rows=tuple(
                    _placed_row(number, one)
                    for number, one in enumerate(plan.placement.layers, start=1)
                ),
            ),
        ),
    )


def _placed_row(number: int, layer: LayerPlacement) -> tuple[Cell, ...]:
    skews = layer.natural_skew, layer.placed_skew, layer.least_skew
    return (
        Cell(text=str(number), value=number),
        *(Cell(text=f"{skew:.3f}", value=skew) for skew in skews),
    )


def _saved(best: TrainingAnswer) -> Iterator[str]:
    """Yield what the overlap of exchanges saves."""
    saved, step = best.predicted.saved_by_overlap_seconds, best.predicted.step_seconds
    if saved <= 0:
        return
    words = "Exchanges run beside another micro-batch's computation"
    degree = best.layout.degree
    if degree is not None:
        words = (
            f"Exchanges run in chunks ({degree.forward} forward, {degree.backward} "
            "backward) beside the experts of other chunks"
        )
    without = Cell.seconds(step + saved).text
    share = percent(saved / (step + saved))
    yield f"{words}: that saves {Cell.seconds(saved).text}, {share} of the {without} without it."


def _beside(best: TrainingAnswer) -> Iterator[str]:
    """Yield what shared experts hide."""
    hidden = best.predicted.hidden_by_shared_experts_seconds
    if hidden > 0:
        yield (
            "Shared experts run beside a layer's first dispatch, backward beside its last combine: "
            f"that hides {Cell.seconds(hidden).text} of exchanges."
        )
