"""Memory of a whole model on one rank: states, activations and buffers of a stage.

s bytes of an element, f of one in full precision, M d_model, H d_hidden, V vocabulary, tp tensor
ranks, T tokens of a micro-batch.
"""

from dataclasses import dataclass

from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.model_plan import ModelMemory
from moetune.domain.plan import Memory
from moetune.domain.units import dtype_bytes
from moetune.solve.model.costs import NORMS_OF_A_BLOCK
from moetune.solve.model.stages import Stage
from moetune.solve.runtime import FULL_BYTES, StateBytes, TargetRuntime

_MASK_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters on one rank of a stage, by the group that replicates them.

    Args:
        dense: replicated in the data-parallel group.
        experts: replicated in the group of the experts' replicas.
    """

    dense: int
    experts: int


def share_of(*, model: Transformer, layout: Layout, stage: Stage) -> Share:
    """Return the parameters of one rank of the stage."""
    vocabulary = model.vocab_per_rank(layout.tp) * model.moe.d_model
    dense = stage.num_blocks * (
        model.attention_parameters // layout.tp + NORMS_OF_A_BLOCK * model.norm_parameters
    )
    dense += stage.num_dense * model.ffn_parameters // layout.tp
    dense += stage.num_moe * model.gate_parameters
    if stage.is_first:
        dense += vocabulary + model.length * model.moe.d_model
    if stage.is_last:
        dense += vocabulary + model.norm_parameters
    sharers = layout.ep * layout.tp
    experts = stage.num_moe * model.moe.num_experts * model.ffn_parameters // sharers
    return Share(dense=dense, experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one micro-batch on one rank.

    Args:
        dense, moe: activations of one block without and with experts.
        block_input: all that a block keeps where it is recomputed.
        head: activations of head and loss.
        buffers: of one MoE layer, while it runs.
    """

    dense: int
    moe: int
    block_input: int
    head: int
    buffers: int


def footprint_of(
    *,
    model: Transformer,
    tp: int,
    tokens: int,
    dtype: str,
    moe: Memory,
    runtime: TargetRuntime,
) -> Footprint:
    """Return the bytes of one micro-batch.

        dense   T·s·(4·M + 4·M/tp + 2·H/tp)
        moe     T·s·(3·M + 4·M/tp) and the MoE layer's activations
        head    T·(2·s·M + (s + f)·V/tp)

    A block saves its input, both norms' results and the sum between them, query, key, value and
    attention's result, and the FFN's hidden values before and after its activation, for swiglu
    also its gate's. Attention's kernel recomputes its scores. An MoE layer's activations include
    its input, the second norm's result. The loss saves the logits, and their softmax in full
    precision.

    Args:
        tokens: T, of the micro-batch.
        moe: memory of one MoE layer with the micro-batch.
    """
    layer, element = model.moe, dtype_bytes(dtype)
    full = max(FULL_BYTES, element)
    width, middles = layer.d_model, 3 if layer.activation == "swiglu" else 2
    dense = 4 * width + (4 * width + middles * layer.d_hidden) // tp
    vocab = model.vocab_per_rank(tp)
    scores = wide_logits = 0
    if runtime.is_unfused:
        scores = tokens * model.length * model.num_heads // tp * (2 * element + _MASK_BYTES)
        wide_logits = tokens * vocab * FULL_BYTES
    with_experts = tokens * element * (3 * width + 4 * width // tp)
    return Footprint(
        dense=tokens * element * dense + scores,
        moe=with_experts + scores + moe.activation_bytes,
        block_input=tokens * element * width,
        head=tokens * (2 * element * width + (element + full) * vocab) + wide_logits,
        buffers=moe.buffer_bytes,
    )


def stage_memory(
    *,
    stage: Stage,
    share: Share,
    each: StateBytes,
    footprint: Footprint,
    num_in_flight: int,
    sharers: tuple[int, int] = (1, 1),
    recompute: bool = False,
    shards_gradients: bool = False,
) -> ModelMemory:
    """Return the bytes on one rank of a stage.

    Args:
        num_in_flight: micro-batches in flight.
        sharers: ranks that shard the optimizer states of dense parameters and of experts (ZeRO).
        recompute: blocks keep their input only, and one at a time is recomputed.
        shards_gradients: gradients are sharded like the optimizer states.
    """
    count = share.dense + share.experts
    states = -(-share.dense // sharers[0]) + -(-share.experts // sharers[1])
    activations = num_in_flight * stage.is_last * footprint.head
    if recompute:
        one = max(footprint.dense * bool(stage.num_dense), footprint.moe * bool(stage.num_moe))
        activations += num_in_flight * stage.num_blocks * footprint.block_input + one
    else:
        blocks = stage.num_dense * footprint.dense + stage.num_moe * footprint.moe
        activations += num_in_flight * blocks
    sizes = {
        "parameter_bytes": count * each.parameter,
        "gradient_bytes": (states if shards_gradients else count) * each.gradient,
        "optimizer_bytes": states * each.optimizer,
        "activation_bytes": activations,
        "buffer_bytes": footprint.buffers if stage.num_moe else 0,
    }
    return ModelMemory(**sizes, total_bytes=sum(sizes.values()))
