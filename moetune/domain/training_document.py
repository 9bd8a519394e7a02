"""A training plan as its JSON document has it: what stores keep, and views and exports read."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias, TypeVar

from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.optimizers import OptimizerName
from moetune.domain.plan import Confidence, Plan
from moetune.domain.targets import TargetName
from moetune.domain.training import TrainingDtype

SCHEMA = "moetune.training-plan/1"
_ID = re.compile(r"[0-9a-f]{64}")
_SIZES = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """What a training plan was asked for, as far as others read it.

    Args:
        global_batch: sequences of a step, of `seq` tokens each.
        target: name of the runtime.
        memory_limit_bytes: usable memory of a device.
    """

    model: str
    world_size: int
    global_batch: int
    seq: int
    dtype: TrainingDtype
    profile: str
    target: TargetName
    memory_limit_bytes: int
    profile_fingerprint: str = ""
    optimizer: OptimizerName = "adam"
    routing: str = "balanced"

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a step, divided by all ranks."""
        return self.global_batch * self.seq // self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The predicted step.

    Args:
        parts: seconds on the slowest pipeline rank, by name.
    """

    step_seconds: float
    parts: Mapping[str, float]
    tokens_per_second_per_device: float = 0.0
    model_tflops_per_device: float = 0.0
    saved_by_overlap_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes of the fullest pipeline rank, by part."""

    peak_bytes: int
    parts: Mapping[str, int]
    host_bytes: int = 0
    rank: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAnswer:
    """A layout with its step and its memory."""

    layout: Mapping[str, object]
    predicted: TrainingStep
    memory: TrainingMemory

    @property
    def words(self) -> str:
        """The layout's sizes above 1 and its micro-batch: "dp 8 · pp 4 · micro-batch 1"."""
        sizes = [(name, self.layout.get(name, 1)) for name in _SIZES]
        above = [f"{name} {size}" for name, size in sizes if size != 1]
        return " · ".join([*above, f"micro-batch {self.layout.get('micro_batch', 1)}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDocument:
    """A training plan's document.

    Args:
        document: all of it, as JSON has it.
        best: the chosen layout; `others` are the next ones.
        front: the fastest layout for each memory, least first; empty where not asked for.
        trust: the least in any number behind the choice.
    """

    document: Mapping[str, object]
    id: str
    inputs: TrainingInputs
    best: TrainingAnswer
    others: tuple[TrainingAnswer, ...]
    confidence: Confidence
    fits: bool
    trust: str
    warnings: tuple[str, ...] = ()
    front: tuple[TrainingAnswer, ...] = ()

    @property
    def text(self) -> str:
        """The document as JSON text."""
        return json.dumps(encode(self.document), ensure_ascii=False, indent=2) + "\n"


AnyPlan: TypeAlias = Plan | TrainingDocument
"""A plan of a layer or of a paper's model, or of a Hugging Face model's training."""


def is_training_document(document: object) -> bool:
    """Return whether plain values say that they are a training plan."""
    return isinstance(document, dict) and document.get("schema") == SCHEMA


def training_from_document(document: object, where: str) -> TrainingDocument:
    """Return the training plan in plain values.

    Args:
        where: what the document is called in an error.

    Raises:
        InputError: another schema, an id that is no digest, a part that is missing, or a value
            that is wrong.
    """
    if not isinstance(document, dict) or not is_training_document(document):
        raise InputError(f"{where} is not a training plan: its schema is not {SCHEMA!r}")
    inputs = _part(TrainingInputs, document, "inputs", where)
    plan_id = document.get("id")
    if not isinstance(plan_id, str) or not _ID.fullmatch(plan_id):
        raise InputError(f"{where}: id must be 64 hexadecimal digits, got {shown(plan_id)}")
    return TrainingDocument(
        document=document,
        id=plan_id,
        inputs=inputs,
        best=_answer(document, where),
        others=_answers(document, "alternatives", where),
        confidence=_part(Confidence, document, "confidence", where),
        fits=decode(bool, document.get("fits", True), f"{where}: fits"),
        trust=decode(str, document.get("trust", "modelled"), f"{where}: trust"),
        warnings=decode(tuple[str, ...], document.get("warnings", []), f"{where}: warnings"),
        front=_answers(document, "front", where),
    )


def _answers(document: Mapping[str, object], name: str, where: str) -> tuple[TrainingAnswer, ...]:
    found = document.get(name, [])
    if not isinstance(found, list):
        raise InputError(f"{where}: {name} must be a list, got {shown(found)}")
    return tuple(_answer(one, f"{where}: {name}[{at}]") for at, one in enumerate(found))


def _answer(document: object, where: str) -> TrainingAnswer:
    if not isinstance(document, dict):
        raise InputError(f"{where} must be a table, got {shown(document)}")
    return TrainingAnswer(
        layout=part_of(document, "layout", where),
        predicted=_part(TrainingStep, document, "predicted", where),
        memory=_part(TrainingMemory, document, "memory", where),
    )


def _part(kind: type[T], document: Mapping[str, object], name: str, where: str) -> T:
    """Return a part with the keys that its dataclass has; plans have more."""
    part = part_of(document, name, where)
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type] # dataclasses only
    wanted = {key: value for key, value in part.items() if key in known}
    return decode(kind, wanted, f"{where}: {name}")


def part_of(document: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    """Return a part of the document.

    Raises:
        InputError: it is missing.
    """
    part = document.get(name)
    if not isinstance(part, dict):
        raise InputError(f"{where}: {name} is missing")
    return part
