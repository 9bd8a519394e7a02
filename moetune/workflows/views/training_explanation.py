"""Why a training plan's layout is the fastest: what its step is made of, and what others have more.

Everything is in the plan's own document, so that no profile is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import fsum

from moetune.domain.document import encode
from moetune.domain.plan import Confidence
from moetune.domain.profile import ProfileQuality
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.report.section import Cell, Section, Table, percent, plural, seconds_span
from moetune.solve.training.ties import NOISE
from moetune.workflows.views.words import (
    how_sure_of_layout,
    largest_first,
    speed_words,
    suspect_words,
)

SCHEMA = "moetune.training-explanation/1"
_COMMUNICATION = frozenset({"exchange", "tensor_comm", "context_comm", "gradients"})
_WAITING = frozenset({"launches", "bubble and sends"})
_TIES = f"Of steps within {percent(NOISE, digits=0)} of each other the simpler layout is taken."
_NAMED = 3
"""Parts of a difference that are said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExplanation:
    """A training plan's answer, and those of the layouts that it was compared with."""

    plan_id: str
    model: str
    best: TrainingAnswer
    others: tuple[TrainingAnswer, ...]
    confidence: Confidence
    limit_bytes: int
    profile: str = ""
    quality: ProfileQuality | None = None

    @property
    def document(self) -> dict[str, object]:
        """What `moetune explain --json` prints."""
        return {
            "schema": SCHEMA,
            "plan": self.plan_id,
            "step_seconds": self.best.predicted.step_seconds,
            "confidence": encode(self.confidence),
            "profile_quality": encode(self.quality),
            "kinds": self.kinds,
            "saved_by_overlap_seconds": self.best.predicted.saved_by_overlap_seconds,
            "model_tflops_per_device": self.best.predicted.model_tflops_per_device,
            "mfu": self.best.predicted.mfu,
            "parts": dict(self.best.predicted.parts),
            "memory": {
                "peak_bytes": self.best.memory.peak_bytes,
                "limit_bytes": self.limit_bytes,
                "parts": dict(self.best.memory.parts),
            },
            "alternatives": [
                {
                    "layout": encode(one.layout),
                    "step_seconds": one.predicted.step_seconds,
                    "differences": self.differences(one),
                }
                for one in self.others
            ],
        }

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of computation, exposed communication and waiting; they add up to the step."""
        found: dict[str, list[float]] = {"computation": [], "communication": [], "waiting": []}
        for name, seconds in self.best.predicted.parts.items():
            if name in _COMMUNICATION:
                found["communication"].append(seconds)
            elif name in _WAITING:
                found["waiting"].append(seconds)
            else:
                found["computation"].append(seconds)
        return {name: fsum(some) for name, some in found.items()}  # in whatever order they are

    def differences(self, other: TrainingAnswer) -> dict[str, float]:
        """Return by how many seconds each part of another layout is longer, the largest first."""
        own, found = self.best.predicted.parts, other.predicted.parts
        names = dict.fromkeys((*own, *found))
        more = {name: found.get(name, 0.0) - own.get(name, 0.0) for name in names}
        return dict(sorted(more.items(), key=lambda item: -abs(item[1])))


def explain_training(plan: TrainingDocument) -> TrainingExplanation:
    """Return the explanation of a training plan."""
    return TrainingExplanation(
        plan_id=plan.id,
        model=plan.inputs.model,
        best=plan.best,
        others=plan.alternatives,
        confidence=plan.confidence,
        limit_bytes=plan.inputs.memory_limit_bytes,
        profile=plan.inputs.profile,
        quality=plan.profile_quality,
    )


def training_explanation_sections(found: TrainingExplanation) -> Iterator[Section]:
    """Yield the sections: where the time goes, the memory, and why the others are slower."""
    best = found.best
    step = best.predicted.step_seconds
    sure, limit = found.confidence, Cell.size(found.limit_bytes).text
    span = seconds_span(step, sure.p05_step_seconds, sure.p95_step_seconds)
    kinds = ", ".join(f"{name} {percent(of / step)}" for name, of in found.kinds.items())
    speed = speed_words(best.predicted.throughput)
    longest = max(best.predicted.parts, key=best.predicted.parts.__getitem__)
    yield Section(
        name="time",
        title=f"A step of {found.model}: {best.words}",
        paragraphs=(
            f"{span} a step, {speed}: {kinds}. Most of it: {longest}.",
            *suspect_words(found.profile, found.quality),
            *_saved(best),
            how_sure_of_layout(sure),
        ),
        tables=(_parts(best, step),),
    )
    yield Section(
        name="memory",
        title=f"Memory of a device: {Cell.size(best.memory.peak_bytes).text} of {limit}",
        tables=(
            Table(
                name="memory",
                header=("part", "bytes"),
                rows=tuple(
                    (Cell.words(name), Cell.size(round(size)))
                    for name, size in largest_first(best.memory.parts)
                ),
            ),
        ),
    )
    if found.others:
        shortest = min(one.predicted.step_seconds for one in found.others)
        yield Section(
            name="alternatives",
            title=f"The next {plural(len(found.others), 'layout')}",
            tables=(_others(found),),
            notes=(_TIES,) if shortest < step else (),
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


def _parts(best: TrainingAnswer, step: float) -> Table:
    parts = sorted(best.predicted.parts.items(), key=lambda item: -item[1])
    return Table(
        name="time",
        header=("part", "seconds", "share"),
        rows=tuple(
            (Cell.words(name), Cell.seconds(seconds), Cell.share(seconds / step))
            for name, seconds in parts
            if seconds > 0
        ),
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
            for one in found.others
        ),
    )


def _most(differences: Mapping[str, float], step: float) -> str:
    """Return the parts that differ most, such as "exchange +3.2 %, experts −1.1 %" of the step."""
    said = [*differences.items()][:_NAMED]
    return ", ".join(f"{name} {percent(more / step, sign=True)}" for name, more in said if more)
