"""A training plan as its JSON document, which stores keep and which views and exports read."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from moetune.domain.budget import Budget, Spread, TrainingRun
from moetune.domain.chunks import Chunks
from moetune.domain.document import UNLESS_DEFAULT, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.layer import Throughput
from moetune.domain.optimizers import OptimizerName
from moetune.domain.packing import Packing
from moetune.domain.placement import ModelPlacement
from moetune.domain.plan import Confidence
from moetune.domain.profile import ProfileQuality, Provenance
from moetune.domain.records import Calibration, factor_of
from moetune.domain.targets import Target, TargetName, planned_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingDtype
from moetune.domain.tuning import TRAINS_ALL, Trained, Tuning

SCHEMA: Literal["moetune.training-plan/1"] = "moetune.training-plan/1"
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """The question of a training plan.

    Args:
        target_version: version of the runtime; "" without any, and in plans of the first version.
        model_path: the configuration that the model was read from; "" for a named model.
        budget: budget of the whole training; None if the question has no budget.
        packing: packing of documents into sequences; None for a single document in each.
    """

    model: str
    world_size: int
    global_batch: int
    seq: int
    dtype: TrainingDtype
    profile: str
    target: TargetName
    memory_limit_bytes: int
    pins: LayoutRequest = field(default_factory=LayoutRequest)
    profile_fingerprint: str = ""
    optimizer: OptimizerName = "adam"
    routing: str = "balanced"
    leaves_room: bool = field(default=False, metadata=UNLESS_DEFAULT)
    model_path: str = field(default="", metadata=UNLESS_DEFAULT)
    target_version: str = field(default="", metadata=UNLESS_DEFAULT)
    budget: Budget | None = field(default=None, metadata=UNLESS_DEFAULT)
    tuning: Tuning = field(default=TRAINS_ALL, metadata=UNLESS_DEFAULT)
    packing: Packing | None = field(default=None, metadata=UNLESS_DEFAULT)

    @property
    def runtime(self) -> str:
        """The runtime with its version, as in `--target`: "megatron@0.18.2"."""
        return f"{self.target}@{self.target_version}" if self.target_version else self.target

    @property
    def facts(self) -> Target:
        """The facts of the plan's runtime; raises InputError if its version is unknown."""
        return planned_target(self.target, self.target_version)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a step, divided by all ranks."""
        return self.global_batch * self.seq // self.world_size

    def run(self, seconds: Spread) -> TrainingRun | None:
        """Return the budget's whole training, from a step's seconds; None without a budget."""
        if self.budget is None:
            return None
        return self.budget.run(
            seconds, tokens_per_step=self.global_batch * self.seq, world_size=self.world_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The predicted step; raises InputError if it takes no time.

    Args:
        parts: seconds on the slowest pipeline rank, by name.
        mean_parts: the same as a mean over ranks; empty without a pipeline, or in old plans.
        saved_by_overlap_seconds: seconds that overlap saves.
        saved_by_graphs_seconds: seconds that CUDA graphs save.
        bound_by_host_seconds: time of that rank's blocks that wait for the host's launches.
        bound_by_replicas_seconds: time of passes that gradient and parameter collectives outlast.
    """

    step_seconds: float
    parts: Mapping[str, float]
    tokens_per_second_per_device: float = 0.0
    model_tflops_per_device: float = 0.0
    model_flops_per_second_per_device: float = 0.0
    mfu: float | None = None
    saved_by_overlap_seconds: float = 0.0
    saved_by_graphs_seconds: float = field(default=0.0, metadata=UNLESS_DEFAULT)
    bound_by_host_seconds: float = field(default=0.0, metadata=UNLESS_DEFAULT)
    bound_by_replicas_seconds: float = field(default=0.0, metadata=UNLESS_DEFAULT)
    mean_parts: Mapping[str, float] = field(default_factory=dict, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        if self.step_seconds <= 0:
            raise InputError(f"step_seconds must be above 0, got {self.step_seconds}")

    @property
    def throughput(self) -> Throughput:
        """Model FLOPs a second of one device."""
        return Throughput(flops_per_second=self.model_tflops_per_device * 1e12, mfu=self.mfu)


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
    """A layout with its predicted step and memory."""

    layout: FoldedLayout
    predicted: TrainingStep
    memory: TrainingMemory

    @property
    def words(self) -> str:
        """The layout's sizes."""
        return self.layout.words

    @property
    def mean_parts(self) -> Mapping[str, float]:
        """Mean seconds of ranks by part, to compare layouts; empty in old plans."""
        return self.predicted.parts if self.layout.pp == 1 else self.predicted.mean_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrigin:
    """The origin of a plan's numbers.

    Args:
        public_ratios: measured over predicted seconds of public runs; nine of ten runs are between
            the two ratios (docs/results/public-runs.md).
    """

    provenance: Provenance
    device: str
    public_ratios: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A shorter step, after a change of a single flag of the question.

    Args:
        change: the flag with its value; "" for the question without any pin.
        peak_bytes: peak of a device; it may be above the limit.
    """

    change: str
    layout: str
    step_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDocument:
    """A training plan, which `moetune plan --json` prints; raises InputError for a wrong id.

    Args:
        layout, predicted, memory: the chosen answer; `alternatives` are the next best answers.
        trust: the least trust in any number behind the choice.
        front: the fastest layout for each memory, least memory first; empty unless asked for.
        placement: placement of experts by a record of the layers' routing; None without a record.
        chunks: chunks of states in moetune.shard; None unless single ranks shard all states.
        savings: shorter steps by single flags, the shortest step first.
        free: the best layout without pins, if it is faster.
        run: the whole training of the inputs' budget; None without a budget.
        calibration: calibration of all times; None without a correction.
        trained: number of parameters that train; None if all train.
    """

    schema: Literal["moetune.training-plan/1"] = SCHEMA
    id: str
    inputs: TrainingInputs
    layout: FoldedLayout
    predicted: TrainingStep
    memory: TrainingMemory
    confidence: Confidence
    fits: bool = True
    trust: str = "modelled"
    profile_quality: ProfileQuality | None = None
    warnings: tuple[str, ...] = ()
    alternatives: tuple[TrainingAnswer, ...] = ()
    front: tuple[TrainingAnswer, ...] = field(default=(), metadata=UNLESS_DEFAULT)
    placement: ModelPlacement | None = field(default=None, metadata=UNLESS_DEFAULT)
    chunks: Chunks | None = field(default=None, metadata=UNLESS_DEFAULT)
    origin: PlanOrigin | None = field(default=None, metadata=UNLESS_DEFAULT)
    savings: tuple[Saving, ...] = field(default=(), metadata=UNLESS_DEFAULT)
    free: Saving | None = field(default=None, metadata=UNLESS_DEFAULT)
    run: TrainingRun | None = field(default=None, metadata=UNLESS_DEFAULT)
    calibration: Calibration | None = field(default=None, metadata=UNLESS_DEFAULT)
    trained: Trained | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise InputError(f"id must be 64 hexadecimal digits, got {shown(self.id)}")

    @property
    def best(self) -> TrainingAnswer:
        """The chosen layout."""
        return TrainingAnswer(layout=self.layout, predicted=self.predicted, memory=self.memory)

    @property
    def kind(self) -> Literal["training"]:
        """The kind of plan."""
        return "training"

    @property
    def name(self) -> str:
        """Name of the planned training: "Training qwen3-30b-a3b"."""
        return f"Training {self.inputs.model}"

    @property
    def target(self) -> TargetName:
        """The runtime that the plan is for."""
        return self.inputs.target

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.predicted.step_seconds

    @property
    def factor(self) -> float:
        """The calibration's factor on all times."""
        return factor_of(self.calibration)

    @property
    def range_seconds(self) -> tuple[float, float]:
        """The 5th and 95th percentile of the step."""
        return self.confidence.p05_step_seconds, self.confidence.p95_step_seconds

    @property
    def step_times(self) -> Iterator[tuple[str, float]]:
        """Every predicted step by its key."""
        low, high = self.range_seconds
        yield "predicted.step_seconds", self.step_seconds
        yield "confidence.p05_step_seconds", low
        yield "confidence.p95_step_seconds", high
        for answer in self.alternatives:
            yield "alternatives.step_seconds", answer.predicted.step_seconds

    @property
    def needed_bytes(self) -> int:
        """The peak on the device that needs the most."""
        return self.memory.peak_bytes

    @property
    def throughput(self) -> Throughput:
        """Model FLOPs a second of one device."""
        return self.predicted.throughput

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all ranks together."""
        return self.predicted.tokens_per_second_per_device * self.inputs.world_size

    @property
    def words(self) -> str:
        """The layout's sizes."""
        return self.layout.words

    def as_layer(self, where: str = "") -> NoReturn:
        """Raise InputError: a layer's plan is wanted, and the file has a model's plan."""
        name = where or self.id[:6]
        raise InputError(
            f"{name} is the plan of a model's training, which is not run or measured here as "
            "layers are",
            f"{self.target} runs it:  moetune export {name} --target {self.target}\n"
            f"  `moetune explain`, `moetune sensitivity` and `moetune whatif` take it; for times "
            "of your machine measure it with `moetune profile`, and plan with that --profile",
        )

    def as_model(self) -> "TrainingDocument":
        """Return the plan, because it is a whole model's plan."""
        return self

    @property
    def is_placed(self) -> bool:
        """Whether the experts are not in their natural order."""
        return self.placement is not None and self.placement.is_taken

    @property
    def is_suspect(self) -> bool:
        """Whether the profile behind the plan is suspect."""
        return self.profile_quality is not None and self.profile_quality.label == "suspect"

    @property
    def document(self) -> dict[str, object]:
        """The plain values of its JSON document."""
        document: dict[str, object] = encode(self)
        return document

    @property
    def text(self) -> str:
        """The document as JSON text."""
        return json.dumps(self.document, ensure_ascii=False, indent=2) + "\n"
