"""Memory of a whole model on one rank: states, activations and buffers of a stage.

s bytes of an element, f of one in full precision, M d_model, H d_hidden, V vocabulary, tp tensor
ranks, T tokens of a micro-batch.
"""

from dataclasses import dataclass

from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.plan import Memory, ModelMemory
from moetune.domain.units import dtype_bytes
from moetune.solve.model.costs import NORMS_OF_A_BLOCK
from moetune.solve.model.stages import Stage
from moetune.solve.runtime import FULL_BYTES, StateBytes, TargetRuntime

_MASK_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Parameters on one rank of a stage, by who holds the same.

    Args:
        dense: held by all ranks of the data-parallel group.
        experts: held by the experts' replicas.
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
    """Bytes that one micro-batch leaves on one rank, for its backward pass or while it runs.

    Args:
        dense, moe: of one block without and with experts.
        block_input: of one block, all that is left of it where it is computed again.
        head: of head and loss.
        buffers: of one MoE layer, while it runs.
    """

    dense: int
    moe: int
    block_input: int
    head: int
    buffers: int


def footprint_of(
    *, model: Transformer, tp: int, tokens: int, dtype: str, moe: Memory, runtime: TargetRuntime
) -> Footprint:
    """Return the bytes of one micro-batch.

        dense   T·s·(4·M + 4·M/tp + 2·H/tp)
        moe     T·s·(3·M + 4·M/tp) and what the layer keeps
        head    T·(2·s·M + (s + f)·V/tp)

    Kept are the block's input, both norms' results and the sum between them, query, key, value
    and their result, and the network's middle before and after its activation; swiglu keeps
    its gate besides. Scores of attention are computed again by its kernel. A layer with
    experts counts its input, the second norm's result, itself. The loss keeps the logits'
    softmax in full precision beside them.

    Args:
        tokens: T, of the micro-batch.
        moe: what one MoE layer keeps of it.
    """
    layer, element = model.moe, dtype_bytes(dtype)
    full = max(FULL_BYTES, element)
    width, middles = layer.d_model, 3 if layer.activation == "swiglu" else 2
    dense = 4 * width + (4 * width + middles * layer.d_hidden) // tp
    words = model.vocab_per_rank(tp)
    scores = wide_logits = 0
    if runtime.is_unfused:
        scores = tokens * model.length * model.num_heads // tp * (2 * element + _MASK_BYTES)
        wide_logits = tokens * words * FULL_BYTES
    with_experts = tokens * element * (3 * width + 4 * width // tp)
    return Footprint(
        dense=tokens * element * dense + scores,
        moe=with_experts + scores + moe.activation_bytes,
        block_input=tokens * element * width,
        head=tokens * (2 * element * width + (element + full) * words) + wide_logits,
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
        recompute: blocks keep their input only, and one at a time is whole again.
        shards_gradients: those who shard optimizer states shard gradients, too.
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
