"""Reasons of a training plan's layout: what binds, the parts of its step, and its memory.

Everything is in the plan's own document, so that no profile is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moetune.domain.placement import LayerPlacement
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.report.section import Cell, Section, Table, percent
from moetune.solve.joint.pins import pin_flag, pinned
from moetune.solve.joint.ties import NOISE
from moetune.workflows.subjects.model import ModelSubject
from moetune.workflows.views.decision import how_sure_of_training
from moetune.workflows.views.first_words import binding_words, saving_words
from moetune.workflows.views.training import time_table
from moetune.workflows.views.words import largest_first, model_placement_words

_TIES = f"Of steps within {percent(NOISE, digits=0)} of each other the simpler layout is taken."
_MEAN = "Parts are compared on the mean of the pipeline ranks."


@dataclass(frozen=True, slots=True)
class ModelReasons:
    """What an explanation shows of a training plan (`views.explanation.Reasons`)."""

    subject: ModelSubject

    @property
    def title(self) -> str:
        """The model and its layout."""
        return f"{self._plan.inputs.model}: {self._plan.best.words}"

    @property
    def scope(self) -> str:
        """Ranks and work of a step."""
        inputs = self._plan.inputs
        return (
            f"{inputs.world_size:,} ranks · {inputs.global_batch:,} sequences of {inputs.seq:,} "
            f"tokens · {inputs.dtype}"
        )

    @property
    def sure(self) -> str:
        """How sure the layout is among those that its pins leave."""
        return how_sure_of_training(self._plan)

    def words(self) -> Iterator[str]:
        """Yield where the experts of its layers are, and why."""
        return model_placement_words(self._plan)

    def why(self) -> Iterator[str]:
        """Yield what binds, what overlap hides, and what pins cost."""
        yield binding_words(self._plan.best)
        yield from _saved(self._plan.best)
        yield from _beside(self._plan.best)
        yield from saving_words(self._plan)

    def pins(self) -> Iterator[tuple[str, str]]:
        """Yield the pins by their flags."""
        pins = self._plan.inputs.pins
        for name in pinned(pins):
            flag, _, value = pin_flag(pins, name).partition(" ")
            yield flag, value

    def terms(self, *, is_drawn: bool) -> Iterator[Section]:  # noqa: ARG002 - its page has its own
        """Yield the parts of the step, of the memory, and how full the fullest ranks are."""
        best, limit = self._plan.best, self.subject.memory_limit_bytes
        step = best.predicted.step_seconds
        kinds = (f"{name} {percent(of / step)}" for name, of in self.subject.kinds.items())
        yield Section(
            name="terms", title="What the time consists of",
            paragraphs=(f"Of the step: {', '.join(kinds)}.",), tables=(time_table(best),),
        )  # fmt: skip
        peak = Cell.size(best.memory.peak_bytes).text
        rows = largest_first(best.memory.parts)
        yield Section(
            name="memory",
            title=f"Memory of a device: {peak} of {Cell.size(limit).text}",
            tables=(
                Table(
                    name="memory",
                    header=("part", "memory"),
                    rows=tuple((Cell.words(name), Cell.size(round(size))) for name, size in rows),
                ),
            ),
        )
        yield from _placement(self._plan)

    def ranges(self, *, is_drawn: bool) -> Iterator[Section]:  # noqa: ARG002 - there are none
        """Yield nothing: a layout is for one batch."""
        yield from ()

    def notes(self) -> Iterator[str]:
        """Yield how layouts are compared."""
        best, layouts = self._plan.best, self._plan.alternatives
        if any(row.layout.pp > 1 for row in (best, *layouts)):
            yield _MEAN
        if any(row.predicted.step_seconds < best.predicted.step_seconds for row in layouts):
            yield _TIES

    @property
    def _plan(self) -> TrainingDocument:
        return self.subject.plan


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
