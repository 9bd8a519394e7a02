"""Reasons of a training plan's layout: the parts of its step, and what others have more.

Everything is in the plan's own document, so that no profile is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moetune.domain.document import encode
from moetune.domain.placement import LayerPlacement
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.report.section import Cell, Section, Table, percent, plural, seconds_span
from moetune.solve.joint.search import NOISE
from moetune.workflows.views.decision import how_sure_of_training
from moetune.workflows.views.first_words import binding_words, saving_words
from moetune.workflows.views.training import time_table
from moetune.workflows.views.words import (
    kinds_of,
    largest_first,
    model_placement_words,
    speed_words,
    suspect_words,
)

SCHEMA = "moetune.training-explanation/1"
_TIES = f"Of steps within {percent(NOISE, digits=0)} of each other the simpler layout is taken."
_MEAN = "Parts are compared on the mean of the pipeline ranks."
_NAMED = 3
"""Parts of a difference that are said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExplanation:
    """A training plan's answer, and those of the layouts that it was compared with."""

    plan: TrainingDocument

    @property
    def best(self) -> TrainingAnswer:
        """The chosen layout."""
        return self.plan.best

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune explain`."""
        return {
            "schema": SCHEMA,
            "plan": self.plan.id,
            "step_seconds": self.best.predicted.step_seconds,
            "confidence": encode(self.plan.confidence),
            "profile_quality": encode(self.plan.profile_quality),
            "kinds": self.kinds,
            "saved_by_overlap_seconds": self.best.predicted.saved_by_overlap_seconds,
            "hidden_by_shared_experts_seconds": (
                self.best.predicted.hidden_by_shared_experts_seconds
            ),
            "model_tflops_per_device": self.best.predicted.model_tflops_per_device,
            "mfu": self.best.predicted.mfu,
            "parts": dict(self.best.predicted.parts),
            "memory": {
                "peak_bytes": self.best.memory.peak_bytes,
                "limit_bytes": self.plan.inputs.memory_limit_bytes,
                "parts": dict(self.best.memory.parts),
            },
            "alternatives": [
                {
                    "layout": encode(one.layout),
                    "step_seconds": one.predicted.step_seconds,
                    "differences": self.differences(one),
                }
                for one in self.plan.alternatives
            ],
        } | self._placement

    @property
    def _placement(self) -> dict[str, object]:
        """The placement of experts, where a record of the layers was given."""
        placement = self.plan.placement
        return {} if placement is None else {"placement": encode(placement)}

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of computation, exposed communication and waiting; they add up to the step."""
        return kinds_of(self.best.predicted.parts)

    def differences(self, other: TrainingAnswer) -> dict[str, float]:
        """Return by how many seconds each part of another layout is longer, the largest first.

        On the mean of the pipeline ranks; nothing where an older plan has the slowest one's alone.
        """
        own, found = self.best.mean_parts, other.mean_parts
        names = dict.fromkeys((*own, *found)) if own and found else {}
        more = {name: found.get(name, 0.0) - own.get(name, 0.0) for name in names}
        return dict(sorted(more.items(), key=lambda item: (-abs(item[1]), item[0])))


def training_explanation_sections(found: TrainingExplanation) -> Iterator[Section]:
    """Yield the sections: where the time goes, the memory, and why the others are slower."""
    yield _time(found)
    yield _memory(found)
    yield from _placement(found.plan)
    if others := found.plan.alternatives:
        shortest = min(one.predicted.step_seconds for one in others)
        is_piped = any(one.layout.pp > 1 for one in (found.best, *others))
        yield Section(
            name="alternatives",
            title=f"The next {plural(len(others), 'layout')}",
            tables=(_others(found),),
            notes=(
                *((_MEAN,) if is_piped else ()),
                *((_TIES,) if shortest < found.best.predicted.step_seconds else ()),
            ),
        )


def _time(found: TrainingExplanation) -> Section:
    best, inputs, sure = found.best, found.plan.inputs, found.plan.confidence
    step = best.predicted.step_seconds
    span = seconds_span(step, sure.p05_step_seconds, sure.p95_step_seconds)
    kinds = ", ".join(f"{name} {percent(of / step)}" for name, of in found.kinds.items())
    speed = speed_words(best.predicted.throughput)
    longest = max(best.predicted.parts, key=best.predicted.parts.__getitem__)
    return Section(
        name="time",
        title=f"A step of {inputs.model}: {best.words}",
        doubts=tuple(suspect_words(inputs.profile, found.plan.profile_quality)),
        paragraphs=(
            f"{span} a step, {speed}: {kinds}. Most of it: {longest}.",
            *_saved(best),
            *_beside(best),
            binding_words(best),
            *saving_words(found.plan),
            how_sure_of_training(found.plan),
        ),
        tables=(time_table(best),),
    )


def _memory(found: TrainingExplanation) -> Section:
    memory, limit = found.best.memory, found.plan.inputs.memory_limit_bytes
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
        paragraphs=tuple(model_placement_words(plan)),
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


def _others(found: TrainingExplanation) -> Table:
    step = found.best.predicted.step_seconds
    return Table(
        name="alternatives",
        header=("layout", "step", "longer by", "most of it"),
        rows=tuple(
            (
                Cell.words(one.words),
                Cell.seconds(one.predicted.step_seconds),
                Cell.share(one.predicted.step_seconds / step - 1, sign=True),
                Cell.words(_most(found.differences(one), step)),
            )
            for one in found.plan.alternatives
        ),
    )


def _most(differences: Mapping[str, float], step: float) -> str:
    """Return the parts that differ most, such as "exchange +3.2 %, experts −1.1 %" of the step."""
    said = [*differences.items()][:_NAMED]
    return ", ".join(f"{name} {percent(more / step, sign=True)}" for name, more in said if more)
