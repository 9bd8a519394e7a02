"""Why a training plan's layout is the fastest: what its step is made of, and what others have more.

Everything is in the plan's own document, so that no profile is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from moetune.domain.document import decode, encode
from moetune.domain.plan import Confidence
from moetune.domain.profile import ProfileQuality
from moetune.domain.throughput import Throughput
from moetune.report.section import Cell, Section, Table, percent, plural, seconds_span
from moetune.solve.training.search import NOISE
from moetune.workflows.training_files import mapping_of, training_document
from moetune.workflows.views.words import how_sure_of_layout, speed_words, suspect_words

SCHEMA = "moetune.training-explanation/1"
_COMMUNICATION = frozenset({"exchange", "tensor_comm", "context_comm", "gradients"})
_WAITING = frozenset({"launches", "bubble and sends"})
_TIES = f"Of steps within {NOISE:.0%} of each other the simpler layout is taken."
_NAMED = 3
"""Parts of a difference that are said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    step_seconds: float
    parts: Mapping[str, float]
    saved_by_overlap_seconds: float = 0.0
    model_tflops_per_device: float | None = None
    mfu: float | None = None

    @property
    def throughput(self) -> Throughput | None:
        """Model FLOPs a second of one device; None in older plans."""
        if self.model_tflops_per_device is None:
            return None
        return Throughput(flops_per_second=self.model_tflops_per_device * 1e12, mfu=self.mfu)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    peak_bytes: int
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    layout: Mapping[str, object]
    predicted: _Predicted
    memory: _Memory

    @property
    def words(self) -> str:
        """Sizes above 1 of its layout."""
        names = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch")
        sizes = [(name.replace("_", "-"), self.layout.get(name, 1)) for name in names]
        return " · ".join(f"{name} {size}" for name, size in sizes if size != 1) or "one rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExplanation:
    """A training plan's answer, and those of the layouts that it was compared with."""

    plan_id: str
    model: str
    best: _Answer
    others: tuple[_Answer, ...]
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
                    "layout": dict(one.layout),
                    "step_seconds": one.predicted.step_seconds,
                    "differences": self.differences(one),
                }
                for one in self.others
            ],
        }

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of computation, exposed communication and waiting; they add up to the step."""
        found = {"computation": 0.0, "communication": 0.0, "waiting": 0.0}
        for name, seconds in self.best.predicted.parts.items():
            if name in _COMMUNICATION:
                found["communication"] += seconds
            elif name in _WAITING:
                found["waiting"] += seconds
            else:
                found["computation"] += seconds
        return found

    def differences(self, other: _Answer) -> dict[str, float]:
        """Return by how many seconds each part of another layout is longer, the largest first."""
        own, found = self.best.predicted.parts, other.predicted.parts
        names = dict.fromkeys((*own, *found))
        more = {name: found.get(name, 0.0) - own.get(name, 0.0) for name in names}
        return dict(sorted(more.items(), key=lambda item: -abs(item[1])))


def explain_training(path: Path) -> TrainingExplanation:
    """Return the explanation of the plan in a file.

    Raises:
        InputError: the file holds no training plan, or a broken one.
    """
    plan = training_document(path)
    alternatives = plan.get("alternatives")
    inputs = mapping_of(plan, "inputs", path)
    return TrainingExplanation(
        plan_id=str(plan.get("id", "")),
        model=str(inputs.get("model", "")),
        best=_answer(plan, path),
        others=tuple(
            _answer(one, path)
            for one in (alternatives if isinstance(alternatives, list) else ())
            if isinstance(one, dict)
        ),
        confidence=decode(Confidence, mapping_of(plan, "confidence", path), f"{path}: confidence"),
        profile=str(inputs.get("profile", "")),
        quality=_quality(plan.get("profile_quality"), path),
        limit_bytes=decode(int, inputs.get("memory_limit_bytes"), f"{path}: memory_limit_bytes"),
    )


def _quality(document: object, path: Path) -> ProfileQuality | None:
    """Return the quality of the plan's profile; None in older plans, and where it is not known."""
    if document is None:
        return None
    return decode(ProfileQuality, document, f"{path}: profile_quality")


def _answer(document: Mapping[str, object], path: Path) -> _Answer:
    return _Answer(
        layout=mapping_of(document, "layout", path),
        predicted=decode(
            _Predicted, _known(document, "predicted", _Predicted, path), f"{path}: predicted"
        ),
        memory=decode(_Memory, _known(document, "memory", _Memory, path), f"{path}: memory"),
    )


def _known(
    document: Mapping[str, object], name: str, wanted: type, path: Path
) -> dict[str, object]:
    """Return the keys of a part that the explanation needs."""
    part = mapping_of(document, name, path)
    names = [item.name for item in fields(wanted)]
    return {key: part[key] for key in names if key in part}


def training_explanation_sections(found: TrainingExplanation) -> Iterator[Section]:
    """Yield the sections: where the time goes, the memory, and why the others are slower."""
    best = found.best
    step = best.predicted.step_seconds
    sure, limit = found.confidence, Cell.size(found.limit_bytes).text
    span = seconds_span(step, sure.p05_step_seconds, sure.p95_step_seconds)
    kinds = ", ".join(f"{name} {percent(of / step)}" for name, of in found.kinds.items())
    found_speed = best.predicted.throughput
    speed = f", {speed_words(found_speed)}" if found_speed else ""
    longest = max(best.predicted.parts, key=best.predicted.parts.__getitem__)
    yield Section(
        name="time",
        title=f"A step of {found.model}: {best.words}",
        paragraphs=(
            f"{span} a step{speed}: {kinds}. Most of it: {longest}.",
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
                    (Cell.words(name), Cell.size(size))
                    for name, size in best.memory.parts.items()
                    if size > 0
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


def _saved(best: _Answer) -> Iterator[str]:
    """Yield what the overlap of exchanges saves."""
    saved, step = best.predicted.saved_by_overlap_seconds, best.predicted.step_seconds
    if saved <= 0:
        return
    words = "Exchanges run beside another micro-batch's computation"
    degree = best.layout.get("degree")
    if isinstance(degree, dict):
        words = (
            f"Exchanges run in chunks ({degree.get('forward')} forward, {degree.get('backward')} "
            "backward) beside the experts of other chunks"
        )
    without = Cell.seconds(step + saved).text
    share = percent(saved / (step + saved))
    yield f"{words}: that saves {Cell.seconds(saved).text}, {share} of the {without} without it."


def _parts(best: _Answer, step: float) -> Table:
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
