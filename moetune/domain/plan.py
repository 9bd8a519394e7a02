"""The plan (plan file): inputs, decision, predicted times with their terms, memory, and reasons."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NoReturn

from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Trust
from moetune.domain.document import UNLESS_DEFAULT, canonical_json
from moetune.domain.errors import InputError
from moetune.domain.kernels import ExpertKernel, KernelChoice, KernelName
from moetune.domain.layer import Throughput, Workload, layer_flops, rate
from moetune.domain.layout import Layout
from moetune.domain.model import MODELS
from moetune.domain.placement import PlacementChoice, check_order
from moetune.domain.profile import ProfileQuality
from moetune.domain.request import PlanInputs
from moetune.domain.terms import LayerTerms
from moetune.domain.units import format_chunks
from moetune.domain.withdrawn import common_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Confidence in a choice, over draws: refits of measurements, or errors of past predictions.

    Args:
        probability_best: share of the draws in which no other choice is better.
        expected_regret: mean relative loss over the draws.
        p05_step_seconds, p95_step_seconds: percentiles of the chosen step over the draws.
    """

    probability_best: float
    expected_regret: float
    p05_step_seconds: float
    p95_step_seconds: float


PLAN_SCHEMA = 2
READABLE_SCHEMAS = (1, 2)
"""Plans of schema 1 have no terms: to explain such a plan, its candidates are ranked again."""
MAKE_PLAN = (
    "make a plan:  moetune plan --model qwen3-30b-a3b --profile h100-x8 --target megatron "
    "--global-batch 256 --seq 4096 --output plan.json"
)
Binding = Literal["communication", "computation", "copies", "memory"]
Range = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Chunks of forward and backward, and the degrees for other numbers of tokens.

    Forward and backward have equal degrees in new plans; they may differ in older plans.

    Args:
        ranges: (low_tokens, high_tokens, forward_degree, backward_degree), both ends
            included, disjoint, sorted and without gaps.
    """

    forward_degree: int
    backward_degree: int
    order: Order
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, and what the strategy saves (MPipeMoE Eq. 1–6).

    Args:
        peak_bytes: peak of a step as the layer runs it, which limits bound; None in older plans.
    """

    strategy: Strategy
    state_bytes: int
    activation_bytes: int
    buffer_bytes: int
    saved_bytes: int
    saving_ratio: float
    peak_bytes: int | None = field(default=None, metadata=UNLESS_DEFAULT)

    @property
    def formula_bytes(self) -> int:
        """All bytes of the papers' formulas on one device."""
        return self.state_bytes + self.activation_bytes + self.buffer_bytes

    @property
    def device_bytes(self) -> int:
        """The peak on one device; the formulas' bytes if the plan has no peak."""
        return self.formula_bytes if self.peak_bytes is None else self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted times of one step of the layer; raises InputError for a time below 0.

    Args:
        forward_seconds, backward_seconds: times of the pipelined part.
        sequential_forward_seconds, sequential_backward_seconds: the same in one chunk.
        overhead_seconds: gate and permutation; 0 if the profile has not measured them.
        model_flops_per_second_per_device: see `Throughput`; None in older plans.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    sequential_forward_seconds: float
    sequential_backward_seconds: float
    overhead_seconds: float
    p05_step_seconds: float
    p95_step_seconds: float
    trust: Trust
    model_flops_per_second_per_device: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    mfu: float | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.name.endswith("_seconds")):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def sequential_step_seconds(self) -> float:
        """The step in one chunk."""
        pipelined = self.sequential_forward_seconds + self.sequential_backward_seconds
        return pipelined + self.overhead_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A degree, an order and a strategy that could be chosen, with their predicted step."""

    forward_degree: int
    backward_degree: int
    order: Order
    strategy: Strategy
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Choice):
    """A choice that lost, and why."""

    lost_because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Confidence in the choice, the resource that binds it, and the reason for it."""

    probability_best: float
    expected_regret: float
    runner_up: Choice | None
    binding: Binding
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The degree, order, memory strategy and kernel of a layer for one number of tokens.

    Args:
        kernel: kernel of the experts; None for torch's `grouped_mm` where the GPU has it.
    """

    forward_degree: int
    backward_degree: int
    order: Order = "dispatch_first"
    strategy: Strategy = "none"
    kernel: ExpertKernel | None = field(default=None, metadata=UNLESS_DEFAULT)

    @property
    def degree(self) -> int:
        """Chunks of each phase; raises InputError if the phases differ, as in older plans."""
        return common_degree(self.forward_degree, self.backward_degree)

    def with_degree(self, degree: int) -> "Decision":
        """Return the decision with `degree` chunks in both phases."""
        return replace(self, forward_degree=degree, backward_degree=degree)


SAFE_DECISION = Decision(forward_degree=1, backward_degree=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One solved plan. Raises InputError if its id is not the hash of its inputs.

    Args:
        terms: terms of the times in `predicted`; None in plans of schema 1.
        profile_quality: None if the profile says nothing of its errors, and in older plans.
        placement: placement of the experts; None in older plans, and without each expert's load.
        kernel: kernel of the experts; None if the profile has measured no second kernel, and in
            older plans. The layer then uses torch's `grouped_mm` where the GPU has it.
    """

    schema: int = PLAN_SCHEMA
    id: str
    inputs: PlanInputs
    layout: Layout
    pipeline: Pipeline
    memory: Memory
    predicted: Predicted
    decision: Verdict
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    terms: LayerTerms | None = None
    profile_quality: ProfileQuality | None = field(default=None, metadata=UNLESS_DEFAULT)
    placement: PlacementChoice | None = field(default=None, metadata=UNLESS_DEFAULT)
    kernel: KernelChoice | None = field(default=None, metadata=UNLESS_DEFAULT)

    @property
    def kind(self) -> Literal["layer", "tensor"]:
        """Kind of the plan: "tensor" if tensor-parallel ranks share the layer."""
        return "tensor" if self.layout.expert_parallel == "tensor" else "layer"

    @property
    def name(self) -> str:
        """Name of the planned layer: "GPT-XL MoE layer", or the sizes of an unnamed layer."""
        model, layer = MODELS.get(self.inputs.model or ""), self.inputs.layer
        name = model.title if model else f"MoE layer {layer.d_model} × {layer.d_hidden}"
        return name + (" layer" if name.endswith("MoE") else "")

    @property
    def target(self) -> str:
        """The runtime that a plan is for: "", since moetune's layers need no name."""
        return ""

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.predicted.step_seconds

    @property
    def range_seconds(self) -> tuple[float, float]:
        """The 5th and 95th percentile of the step."""
        return self.predicted.p05_step_seconds, self.predicted.p95_step_seconds

    @property
    def step_times(self) -> Iterator[tuple[str, float]]:
        """Every predicted step by its key."""
        for key in ("step_seconds", "p05_step_seconds", "p95_step_seconds"):
            yield f"predicted.{key}", getattr(self.predicted, key)
        yield "predicted.sequential_step_seconds", self.predicted.sequential_step_seconds
        yield from (("alternatives.step_seconds", plan.step_seconds) for plan in self.alternatives)

    @property
    def needed_bytes(self) -> int:
        """The peak on one device: see `Memory.device_bytes`."""
        return self.memory.device_bytes

    @property
    def trust(self) -> Trust:
        """The least certain source of any number behind the plan."""
        return self.predicted.trust

    @property
    def throughput(self) -> Throughput | None:
        """Model FLOPs a second of one device, recounted in older plans; None for a step of 0 s."""
        flops = self.predicted.model_flops_per_second_per_device
        if flops is not None:
            return Throughput(flops_per_second=flops, mfu=self.predicted.mfu)
        return rate(layer_flops(self.workload), self.step_seconds, None)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of all ranks; tensor ranks count theirs once. None for a step of 0 s."""
        sets = self.layout.dp if self.kind == "tensor" else self.inputs.world_size
        step = self.step_seconds
        return sets * self.inputs.tokens_per_rank / step if step else None

    @property
    def words(self) -> str:
        """The chunks, and how memory is reused: "4 chunks, strategy S4"."""
        strategy = self.memory.strategy
        reused = "" if strategy == "none" else f", strategy {strategy}"
        chunks = format_chunks(self.pipeline.forward_degree, self.pipeline.backward_degree)
        return f"{chunks}{reused}"

    @property
    def text(self) -> str:
        """The plan file: canonical JSON and a line end."""
        return canonical_json(self) + "\n"

    def as_layer(self, where: str = "") -> "Plan":  # noqa: ARG002 - the other kind's
        """Return the plan, because it is a layer's plan."""
        return self

    def as_model(self) -> NoReturn:
        """Raise InputError: a whole model's plan is wanted."""
        raise InputError(
            f"plan {self.id[:6]} is the plan of a layer, and a whole model's is wanted here",
            f"moetune.open_planbook reads it as it is; for a layout, {MAKE_PLAN}",
        )

    @property
    def experts(self) -> tuple[int, ...]:
        """Expert of each place in the order of the ranks; empty for the natural order."""
        return () if self.placement is None else self.placement.experts

    @property
    def is_placed(self) -> bool:
        """Whether the experts are not in their natural order."""
        return bool(self.experts)

    @property
    def is_suspect(self) -> bool:
        """Whether the profile behind the plan is suspect."""
        return self.profile_quality is not None and self.profile_quality.label == "suspect"

    def __post_init__(self) -> None:
        if self.id != self.inputs.plan_id:
            raise InputError(
                "id is not the hash of inputs", "the file was edited: make the plan again"
            )
        _check_pipeline(self.pipeline)
        if self.experts:
            check_order(self.experts, self.inputs.layer.num_experts)

    @property
    def workload(self) -> Workload:
        """The MoE layer, on the ranks that share its experts."""
        kernel = self.kernel
        name: KernelName = "" if kernel is None or kernel.is_usual else kernel.name
        return self.inputs.workload(self.layout, self.experts, name)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a step on each rank."""
        return self.inputs.tokens_per_rank

    def decide(self, tokens_per_rank: int) -> Decision:
        """Return the decision for these tokens: the plan's, or else the nearest range's."""
        pipeline = self.pipeline
        if tokens_per_rank == self.tokens_per_rank or not pipeline.ranges:
            forward, backward = pipeline.forward_degree, pipeline.backward_degree
        else:
            index = bisect_right(pipeline.ranges, tokens_per_rank, key=lambda row: row[0])
            _, _, forward, backward = pipeline.ranges[max(index - 1, 0)]
        return Decision(
            forward_degree=forward,
            backward_degree=backward,
            order=pipeline.order,
            strategy=self.memory.strategy,
            kernel=self.kernel.name if self.kernel else None,
        )


def nearest_plan(plans: Sequence[Plan], tokens_per_rank: int) -> Plan:
    """Return the plan made for the nearest number of tokens, by the ratio of the two."""
    return min(
        plans, key=lambda plan: abs(math.log(max(tokens_per_rank, 1) / plan.tokens_per_rank))
    )


def _check_pipeline(pipeline: Pipeline) -> None:
    if pipeline.forward_degree < 1 or pipeline.backward_degree < 1:
        raise InputError("pipeline: degrees must be at least 1")
    expected_low = None
    for low, high, forward, backward in pipeline.ranges:
        if low < 1 or high < low or forward < 1 or backward < 1:
            raise InputError(f"pipeline.ranges: {[low, high, forward, backward]} is no range")
        if expected_low is not None and low != expected_low:
            raise InputError(f"pipeline.ranges: {low} does not follow {expected_low - 1}")
        expected_low = high + 1
