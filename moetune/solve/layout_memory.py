"""What one rank keeps of a whole model: parameters, gradients, optimizer, activations, buffers.

s bytes of an element, M d_model, H d_hidden, tp tensor ranks, T tokens of a micro-batch.
"""

from dataclasses import dataclass, replace

from moetune.domain.plan import Layout, Memory, ModelMemory
from moetune.domain.transformer import Transformer
from moetune.domain.units import dtype_bytes
from moetune.solve.layout_parts import NORMS_OF_A_BLOCK, Traits
from moetune.solve.layout_stages import Stage, in_flight

FULL_BYTES = 4
"""Of an element in full precision, in which gradients and optimizer states are kept."""
MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter; PPMoE §4.1's 18 in mixed precision, Adam's 16 in float32."""

    parameter: int
    gradient: int
    optimizer: int


def state_bytes(dtype: str) -> StateBytes:
    """Return the bytes of one parameter, its gradient and Adam's states for it.

    With elements of 2 bytes there is a copy of the parameter in float32 among the states.
    """
    element = dtype_bytes(dtype)
    full = max(FULL_BYTES, element)
    has_copy = element < full
    return StateBytes(parameter=element, gradient=full, optimizer=full * (MOMENTS + has_copy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters on one rank of a stage, by who holds the same.

    Args:
        dense: held by all ranks of the data-parallel group.
        experts: held by the experts' replicas.
    """

    dense: int
    experts: int


def share_of(*, model: Transformer, layout: Layout, stage: Stage, traits: Traits) -> Share:
    """Return the parameters of one rank of the stage."""
    vocabulary = model.token_parameters
    if traits.splits_vocabulary:
        vocabulary //= layout.tp
    dense = stage.num_blocks * (
        model.attention_parameters // layout.tp + NORMS_OF_A_BLOCK * model.norm_parameters
    )
    dense += stage.num_dense * model.ffn_parameters // layout.tp
    dense += stage.num_moe * model.gate_parameters
    if stage.is_first:
        dense += vocabulary + model.length * model.moe.d_model
    if stage.is_last:
        dense += vocabulary + model.norm_parameters
    sharers = layout.ep if layout.expert_parallel == "all_to_all" else layout.tp
    experts = stage.num_moe * (model.moe.num_experts // sharers) * model.ffn_parameters
    return Share(dense=dense, experts=experts)


def stage_memory(
    *,
    model: Transformer,
    layout: Layout,
    stages: tuple[Stage, ...],
    index: int,
    dtype: str,
    tokens: int,
    num_micro_batches: int,
    moe: Memory,
    traits: Traits,
) -> ModelMemory:
    """Return the bytes on one rank of a stage, with everything kept and nothing sharded.

    Args:
        tokens: of a micro-batch.
        moe: what one MoE layer keeps of it.
    """
    stage, each = stages[index], state_bytes(dtype)
    share = share_of(model=model, layout=layout, stage=stage, traits=traits)
    count = share.dense + share.experts
    element = dtype_bytes(dtype)
    blocks = stage.num_dense * dense_block_bytes(model, tp=layout.tp, tokens=tokens, dtype=dtype)
    blocks += stage.num_moe * moe_block_bytes(
        model, tp=layout.tp, tokens=tokens, dtype=dtype, moe=moe
    )
    kept = in_flight(stage=index, num_stages=len(stages), num_micro_batches=num_micro_batches)
    head = 0
    if stage.is_last:
        words = model.vocab_size // (layout.tp if traits.splits_vocabulary else 1)
        head = 2 * tokens * (model.moe.d_model + words) * element
    return _sum_up(
        ModelMemory(
            parameter_bytes=count * each.parameter,
            gradient_bytes=count * each.gradient,
            optimizer_bytes=count * each.optimizer,
            activation_bytes=kept * (blocks + head),
            buffer_bytes=moe.buffer_bytes if stage.num_moe else 0,
            total_bytes=0,
        )
    )


def dense_block_bytes(model: Transformer, *, tp: int, tokens: int, dtype: str) -> int:
    """Return the activations of a block without experts: T·s·(4·M + 4·M/tp + 2·H/tp).

    Kept are the block's input, both norms' results and the sum between them, query, key, value
    and their result, and the network's middle before and after its activation; swiglu keeps
    its gate besides. Scores of attention are computed again by its kernel.
    """
    layer = model.moe
    kept = 3 if layer.activation == "swiglu" else 2
    elements = 4 * layer.d_model + (4 * layer.d_model + kept * layer.d_hidden) // tp
    return tokens * elements * dtype_bytes(dtype)


def moe_block_bytes(model: Transformer, *, tp: int, tokens: int, dtype: str, moe: Memory) -> int:
    """Return the activations of a block with experts: T·s·(3·M + 4·M/tp) and the layer's.

    The second norm's result is the layer's input, which the layer counts.
    """
    width = model.moe.d_model
    return tokens * (3 * width + 4 * width // tp) * dtype_bytes(dtype) + moe.activation_bytes


def recomputed(
    memory: ModelMemory, *, model: Transformer, layout: Layout, stage: Stage, dtype: str,
    tokens: int, num_kept: int, moe: Memory,
) -> ModelMemory:  # fmt: skip
    """Return the memory where blocks keep their input only, and one at a time is whole again.

    Args:
        memory: of the stage with everything kept.
        num_kept: micro-batches in flight.
    """
    dense = dense_block_bytes(model, tp=layout.tp, tokens=tokens, dtype=dtype)
    with_experts = moe_block_bytes(model, tp=layout.tp, tokens=tokens, dtype=dtype, moe=moe)
    saved = num_kept * (stage.num_dense * dense + stage.num_moe * with_experts)
    inputs = num_kept * stage.num_blocks * tokens * model.moe.d_model * dtype_bytes(dtype)
    whole = max(dense if stage.num_dense else 0, with_experts if stage.num_moe else 0)
    activations = memory.activation_bytes - saved + inputs + whole
    return _sum_up(replace(memory, activation_bytes=activations))


def sharded(
    memory: ModelMemory, *, share: Share, dtype: str, data: int, replicas: int
) -> ModelMemory:
    """Return the memory with optimizer states sharded over those that hold the same (ZeRO).

    Args:
        data: ranks that hold the same dense parameters.
        replicas: ranks that hold the same experts.
    """
    states = -(-share.dense // data) + -(-share.experts // replicas)
    return _sum_up(replace(memory, optimizer_bytes=states * state_bytes(dtype).optimizer))


def _sum_up(memory: ModelMemory) -> ModelMemory:
    return replace(
        memory,
        total_bytes=memory.parameter_bytes
        + memory.gradient_bytes
        + memory.optimizer_bytes
        + memory.activation_bytes
        + memory.buffer_bytes,
    )
