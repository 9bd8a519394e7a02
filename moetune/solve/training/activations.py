"""Bytes of one block's activations that a micro-batch leaves for its backward pass on a rank.

bfloat16 tensors that Megatron-Core with Transformer Engine keeps, FlashAttention without scores;
of routed experts what the target's do. A recomputed module keeps its inputs alone.
"""

from moetune.domain.architecture import Block, Part
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.pipeline import SPLITTING
from moetune.domain.recurrent import StateSpace
from moetune.domain.targets import KeptByExperts
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.units import dtype_bytes

ELEMENT, FULL = dtype_bytes("bfloat16"), dtype_bytes("float32")
AS_MEGATRON = KeptByExperts()


def block_bytes(
    block: Block, job: TrainingJob, layout: FoldedLayout, kept: KeptByExperts = AS_MEGATRON
) -> float:
    """Return the bytes of a block for one micro-batch."""
    return sum(block_modules(block, job, layout, kept).values())


def block_modules(
    block: Block, job: TrainingJob, layout: FoldedLayout, kept: KeptByExperts = AS_MEGATRON
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    "inputs" are those of the norms, which the residual sum needs anyway; "norms" what they write.
    """
    tokens = layout.micro_batch * job.length / (layout.cp * layout.tp)
    residual = ELEMENT * tokens * job.decoder.d_model
    if "full" in layout.recompute:
        return {"inputs": residual}
    norms = sum(not _norm_is_freed(part, layout) for part in block.parts)
    found = {"inputs": residual * len(block.parts), "norms": residual * norms}
    for part in block.parts:
        for name, size in _part_modules(part, job, layout, tokens, kept).items():
            found[name] = found.get(name, 0.0) + size
    return found


def _norm_is_freed(part: Part, layout: FoldedLayout) -> bool:
    """Return whether the output of the norm before a part is computed again.

    Only before latent attention and routed experts is it a module of its own: Transformer Engine
    fuses it into the other projections, where Megatron-Core cannot drop its output alone
    (`gpt_layer_specs.py`, `mamba_layer_specs.py`).
    """
    if isinstance(part, DenseFfn):
        return "mlp" in layout.recompute
    return "norm" in layout.recompute and isinstance(part, LatentAttention | RoutedExperts)


def workspace_bytes(block: Block, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the bytes of the widest gradient of a block while it is computed."""
    tokens = layout.micro_batch * job.length / (layout.cp * layout.tp)
    routed = block.routed
    widest = job.decoder.d_model
    if routed is not None:
        hidden = routed.d_hidden / layout.etp
        widest = round(most_rows(routed, job, layout) * 2 * (routed.d_expert + hidden))
    return ELEMENT * tokens * widest


def _part_modules(
    part: Part, job: TrainingJob, layout: FoldedLayout, tokens: float, kept: KeptByExperts
) -> dict[str, float]:
    if isinstance(part, DenseFfn):
        return {} if "mlp" in layout.recompute else {"mlp": _ffn_bytes(part, tokens)}
    if isinstance(part, RoutedExperts):
        if "moe" in layout.recompute:
            return {}
        return _routed_modules(part, tokens * most_rows(part, job, layout), tokens, layout, kept)
    widths = part.widths
    inner = sum(widths.values()) + _kept_inside(part)
    if isinstance(part, LatentAttention) and "mla_up_proj" in layout.recompute:
        inner -= widths["q"] + widths["k"] + widths["v"] + _kept_inside(part)
    # The output of recomputed core attention is the next projection's input, and kept all the same.
    heads: int = getattr(part, "num_heads", 0)
    return {part.name: tokens * (ELEMENT * inner + FULL * heads)}


def _kept_inside(part: Part) -> int:
    """Return the elements of a token that a mixer keeps beside its widths.

    Norms of queries, keys and latent vectors keep what they read. Mamba-2's scan keeps its output
    before the gate, and the norm behind it the one after the gate (mamba_ssm, `ssd_combined.py`).
    """
    if isinstance(part, LatentAttention):
        return (part.q_rank or 0) + part.kv_rank
    if isinstance(part, GroupedQueryAttention) and part.norm_parameters:
        return part.widths["q"] + part.widths["k"]
    if isinstance(part, StateSpace) and not part.rank:
        return 2 * part.d_inner
    return 0


def _ffn_bytes(part: DenseFfn, tokens: float) -> float:
    hidden = (part.num_gemms - 1) * part.d_hidden
    return ELEMENT * tokens * (hidden + part.d_hidden)


def most_rows(part: RoutedExperts, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the rows of the fullest rank for each token of a rank, as memory has to hold them."""
    return part.mean_top_k * job.skew(part, layout.ep).p99 * layout.etp


def _routed_modules(
    part: RoutedExperts, rows: float, tokens: float, layout: FoldedLayout, kept: KeptByExperts
) -> dict[str, float]:
    width = part.d_hidden / layout.etp * (part.num_gemms - 1)
    if kept.activations and "moe_act" not in layout.recompute:
        width += part.d_hidden / layout.etp
    if kept.gradients_wait and layout.order in SPLITTING:
        width += part.d_hidden / layout.etp * (part.num_gemms - 1)
    found = {
        "router": kept.router_copies * FULL * tokens * part.num_experts,
        "experts": ELEMENT * rows * (part.d_expert + width),
    }
    if kept.results:
        found["experts"] += ELEMENT * tokens * part.mean_top_k * layout.etp * part.d_expert
    if part.shared is not None and "shared_experts" not in layout.recompute:
        found["shared_experts"] = _ffn_bytes(part.shared, tokens)
    return found
