"""Bytes of one block's activations that a micro-batch leaves for its backward pass on a rank.

bfloat16 tensors that Megatron-Core with Transformer Engine keeps, FlashAttention without scores;
of routed experts what the target's do. A recomputed module keeps its inputs alone. With 8-bit GEMMs
their inputs are kept as they read them, and nothing else is (`te.pytorch.module.linear`).

torchtitan's selective recomputation keeps of a block its input, what every second matrix gives,
attention's output, and what exchanges and reductions over tensor ranks give; grouped GEMMs of
experts are computed again (`torchtitan/distributed/activation_checkpoint.py`, `SelectiveAC`, whose
list of operations is that of `torch._functorch.partitioners`).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from moetune.domain.architecture import Block, Part
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.pipeline import SPLITTING
from moetune.domain.recurrent import StateSpace
from moetune.domain.targets import Target, find_target
from moetune.domain.training import FoldedLayout, TrainingDtype, TrainingJob
from moetune.domain.units import dtype_bytes

ELEMENT, FULL = dtype_bytes("bfloat16"), dtype_bytes("float32")
AS_MEGATRON = find_target("megatron")
GEMM_INPUT: Mapping[TrainingDtype, float] = MappingProxyType(
    {
        "bfloat16": ELEMENT,
        "float16": ELEMENT,
        "fp8": 1.0,
        "mxfp8": 1 + 1 / 32,
        "nvfp4": 1 / 2 + 1 / 16,
    }
)
"""Bytes of an element that a GEMM keeps for the gradient of its weights, with its scales."""


class _Kept(NamedTuple):
    """What a block's modules keep: of so many tokens, with so many bytes of a GEMM's input.

    Args:
        shared: tokens whose residual sums and norms a rank has.
        tokens: those whose heads and widths, cut over tensor ranks, it has.
    """

    target: Target
    layout: FoldedLayout
    shared: float
    tokens: float
    gemm: float


def block_bytes(
    block: Block, job: TrainingJob, layout: FoldedLayout, target: Target = AS_MEGATRON
) -> float:
    """Return the bytes of a block for one micro-batch."""
    return sum(block_modules(block, job, layout, target).values())


def block_modules(
    block: Block, job: TrainingJob, layout: FoldedLayout, target: Target = AS_MEGATRON
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    "inputs" are those of the norms, which the residual sum needs anyway; "norms" what they write.
    """
    tokens = layout.micro_batch * job.length / (layout.cp * layout.tp)
    shared = tokens if target.splits_sequence else tokens * layout.tp
    kept = _Kept(target, layout, shared, tokens, GEMM_INPUT[job.dtype])
    elements = shared * job.decoder.d_model
    if "full" in layout.recompute:
        return {"inputs": ELEMENT * elements}
    if "selective" in layout.recompute:
        routed, rows = block.routed, 0.0
        if routed is not None and layout.ep > 1 and target.saves_exchanges:
            rows = tokens * most_rows(routed, job, layout)
        return selective_modules(
            block, layout, tokens=tokens, rows=rows, d_model=job.decoder.d_model
        )
    norms = sum(_norm_bytes(part, kept) for part in block.parts)
    found = {"inputs": ELEMENT * elements * len(block.parts), "norms": norms * elements}
    for part in block.parts:
        for name, size in _part_modules(part, job, kept).items():
            found[name] = found.get(name, 0.0) + size
    return found


def _norm_bytes(part: Part, kept: _Kept) -> float:
    """Return the bytes of an element that is kept of the norm before a part.

    The router reads it in bfloat16; two projections to latent vectors keep 8 bits each.
    """
    if _norm_is_freed(part, kept.layout):
        return 0.0
    if isinstance(part, RoutedExperts):
        return ELEMENT
    if isinstance(part, LatentAttention):
        return min(ELEMENT, 2 * kept.gemm)
    return kept.gemm


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
    """Return the bytes of the widest gradients of a block while they are computed."""
    tokens = layout.micro_batch * job.length / (layout.cp * layout.tp)
    widest = float(job.decoder.d_model)
    for part in block.parts:
        if isinstance(part, DenseFfn):
            widest = max(widest, part.num_gemms * part.d_hidden)
    routed = block.routed
    if routed is not None:
        hidden = routed.d_hidden / layout.etp
        widest = round(most_rows(routed, job, layout) * 2 * (routed.d_expert + hidden))
    return ELEMENT * tokens * widest


def exchange_bytes(job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the buffers of HybridEP, outside the allocator: rows and weights of all its ranks.

    One buffer for the dispatch and one for the combine, of as many rows as all ranks' tokens
    (DeepEP, branch hybrid-ep, `csrc/hybrid_ep/hybrid_ep.cu`, `max_num_of_tokens_for_experts`).
    """
    if layout.dispatcher != "hybrid_ep" or layout.ep == 1:
        return 0.0
    tokens = layout.ep * layout.micro_batch * job.length / (layout.cp * layout.tp)
    shapes = (one.layer for one in job.decoder.routed_kinds if one is not None)
    rows = ((ELEMENT * one.d_model, FULL * one.num_experts) for one in shapes)
    return 2 * tokens * max((sum(one) for one in rows), default=0.0)


def _part_modules(part: Part, job: TrainingJob, kept: _Kept) -> dict[str, float]:
    recompute = kept.layout.recompute
    if isinstance(part, DenseFfn):
        return {} if "mlp" in recompute else {"mlp": _ffn_bytes(part, kept)}
    if isinstance(part, RoutedExperts):
        if "moe" in recompute:
            return {}
        return _routed_modules(part, kept.tokens * most_rows(part, job, kept.layout), kept)
    widths = part.widths
    inner = sum(widths.values()) + _kept_inside(part)
    if isinstance(part, LatentAttention) and "mla_up_proj" in recompute:
        inner -= widths["q"] + widths["k"] + widths["v"] + _kept_inside(part)
    # The output of recomputed core attention is the next projection's input, and kept all the same.
    heads: int = getattr(part, "num_heads", 0)
    narrow = kept.gemm * widths.get("output", 0) if kept.gemm < ELEMENT else 0.0
    return {part.name: kept.tokens * (ELEMENT * inner + narrow + FULL * heads)}


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


def _ffn_bytes(part: DenseFfn, kept: _Kept) -> float:
    """Return what an FFN keeps: its up-projections, the factors of an activation, its result."""
    factors = part.is_gated and not kept.target.fuses_activations
    hidden = ELEMENT * (part.num_gemms - 1 + factors) + kept.gemm
    return kept.tokens * part.d_hidden * hidden


def most_rows(part: RoutedExperts, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the rows of the fullest rank for each token of a rank, as memory has to hold them."""
    return part.mean_top_k * job.skew(part, layout.ep).p99 * layout.etp


def _routed_modules(part: RoutedExperts, rows: float, kept: _Kept) -> dict[str, float]:
    target, layout, tokens = kept.target, kept.layout, kept.tokens
    by = target.kept_by_experts
    hidden = part.d_hidden / layout.etp
    width = ELEMENT * hidden * (part.num_gemms - 1)
    if by.activations and "moe_act" not in layout.recompute:
        # The gate's result is a factor, and where rows are weighted here, their product is.
        factors = 0 if target.fuses_activations else part.is_gated + (not by.results)
        width += hidden * (kept.gemm + ELEMENT * factors)
    if by.gradients_wait and layout.order in SPLITTING:
        width += ELEMENT * hidden * (part.num_gemms - 1)
    found = {
        "router": by.router_copies * FULL * tokens * part.num_experts,
        "experts": rows * (kept.gemm * part.d_expert + width),
    }
    if by.results:
        found["experts"] += ELEMENT * tokens * part.mean_top_k * part.d_expert
    if part.shared is not None and "shared_experts" not in layout.recompute:
        found["shared_experts"] = _ffn_bytes(part.shared, kept)
    return found


def selective_modules(
    block: Block, layout: FoldedLayout, *, tokens: float, rows: float, d_model: int
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    Args:
        tokens: of a rank, cut over tensor ranks.
        rows: of its experts that exchanges bring, and are kept.
    """
    found = {"inputs": ELEMENT * tokens * d_model}
    saves = True
    for part in block.parts:
        name, kept = _name(part), 0.0
        for width in _widths(part, d_model):
            kept += ELEMENT * tokens * width * saves
            saves = not saves
        if isinstance(part, RoutedExperts):
            kept += 2 * ELEMENT * rows * part.d_expert
        elif not isinstance(part, DenseFfn):
            heads: int = getattr(part, "num_heads", 0)
            kept += tokens * (ELEMENT * part.widths.get("output", 0) + FULL * heads)
        if layout.tp > 1:
            kept += ELEMENT * tokens * d_model
        found[name] = found.get(name, 0.0) + kept
    return found


def _name(part: Part) -> str:
    if isinstance(part, DenseFfn):
        return "mlp"
    return "experts" if isinstance(part, RoutedExperts) else part.name


def _widths(part: Part, d_model: int) -> Iterator[int]:
    """Yield the outputs of a part's matrices, in the order of their GEMMs."""
    if isinstance(part, RoutedExperts):
        if part.shared is not None:
            yield from _widths(part.shared, d_model)
    elif isinstance(part, DenseFfn):
        yield from (part.d_hidden,) * (part.num_gemms - 1)
        yield d_model
    elif isinstance(part, LatentAttention):
        widths = part.widths
        yield from (widths["q_latent"],) if widths["q_latent"] else ()
        yield widths["q"]
        yield widths["kv_latent"]
        yield part.num_heads * (part.nope_dim + part.v_head_dim)
        yield d_model
    else:
        yield from (width for name, width in part.widths.items() if name != "output" and width)
        yield d_model
