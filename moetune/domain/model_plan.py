"""A whole model in a plan: micro-batches, model states, and the times of parts and stages."""

from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import UNLESS_DEFAULT

ModelBinding = Literal[
    "computation", "all_to_all", "all_reduce", "bubble", "gradients", "chunks", "memory",
]  # fmt: skip
PartName = Literal[
    "gate", "first all_to_all", "second all_to_all", "MoE all_reduce", "experts", "attention",
    "attention all_reduce", "dense FFN", "FFN all_reduce", "norms", "launches", "embedding",
    "head and loss", "vocabulary all_reduce", "stage sends", "gradient sums", "gradients",
    "chunk transfers", "optimizer", "bubble",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Time of one kind of work in the model's step, on the slowest stage.

    Args:
        layer_seconds: one layer's forward pass with one micro-batch; 0 where it has none.
        forward_seconds: all forward passes of the step.
        seconds: the whole step; the parts' sum is the step.
        share: of the step.
    """

    name: PartName
    layer_seconds: float
    forward_seconds: float
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes on the device that needs the most."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One pipeline stage with one micro-batch.

    Args:
        backward_seconds: with the recomputed forward pass of its blocks.
        send_seconds: to the next stage, or back from it; 0 for the last one.
    """

    num_blocks: int
    forward_seconds: float
    backward_seconds: float
    send_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Confidence in a choice, over refits of the measurements, or errors of earlier predictions.

    Args:
        probability_best: share of them in which no other choice is better.
        expected_regret: mean relative loss over them.
        p05_step_seconds, p95_step_seconds: of the chosen step over them.
    """

    probability_best: float
    expected_regret: float
    p05_step_seconds: float
    p95_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerPlan:
    """Micro-batches, model states and times of a whole model in the plan's layout.

    Args:
        zero: optimizer states are sharded over the ranks that hold the same parameters.
        recompute: blocks keep only their input, and are recomputed before their backward pass.
        step_seconds: of the model, from the first micro-batch to the new parameters.
        stages: in their order; empty in older plans.
        confidence: in the layout, against the best other ones; None in older plans.
        model_flops_per_second_per_device: see `domain.throughput`; None in older plans.
        mfu: its share of the data sheet's peak; None where that is not known.
    """

    num_layers: int
    moe_every: int
    micro_batch_sequences: int
    micro_batch_tokens: int
    num_micro_batches: int
    zero: bool
    recompute: bool
    step_seconds: float
    tokens_per_second_per_rank: float
    memory: ModelMemory
    parts: tuple[Part, ...]
    binding: ModelBinding
    stages: tuple[StageTime, ...] = ()
    confidence: Confidence | None = None
    model_flops_per_second_per_device: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    mfu: float | None = field(default=None, metadata=UNLESS_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Model states in chunks (Elixir)."""

    chunk_bytes: int
    cache_bytes: int
    scatter: bool
    offload: bool
