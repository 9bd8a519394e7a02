"""How a whole model runs: a plan's part for all of its layers."""

from dataclasses import dataclass
from typing import Literal

ModelBinding = Literal[
    "computation", "all_to_all", "all_reduce", "bubble", "gradients", "chunks", "memory",
]  # fmt: skip
PartName = Literal[
    "gate", "first all_to_all", "second all_to_all", "MoE all_reduce", "experts", "attention",
    "attention all_reduce", "dense FFN", "FFN all_reduce", "norms", "launches", "embedding",
    "head and loss", "vocabulary all_reduce", "stage sends", "gradients", "chunk transfers",
    "optimizer", "bubble",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one kind of work takes of the model's step, on the slowest stage.

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
        backward_seconds: with what runs forward again before.
        send_seconds: to the next stage, or back from it; 0 for the last one.
    """

    num_blocks: int
    forward_seconds: float
    backward_seconds: float
    send_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerPlan:
    """How a whole model runs in the plan's layout.

    Args:
        zero: optimizer states are sharded over the ranks that hold the same parameters.
        recompute: blocks keep only their input, and run forward again before their backward pass.
        step_seconds: of the model, from the first micro-batch to the new parameters.
        stages: in their order; empty in plans of before they were kept.
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
