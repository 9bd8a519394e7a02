"""Bytes that a rank keeps of one block's activations for its backward pass, and of its states.

bfloat16 tensors that Megatron-Core with Transformer Engine keeps, FlashAttention without scores;
of routed experts what the target's do. A recomputed module keeps its inputs alone. With 8-bit GEMMs
their inputs are kept as they read them, and nothing else is (`te.pytorch.module.linear`).

torchtitan's selective recomputation keeps of a block its input, what every second matrix gives,
attention's output, and what exchanges and reductions over tensor ranks give; grouped GEMMs of
experts are computed again (`torchtitan/distributed/activation_checkpoint.py`, `SelectiveAC`, whose
list of operations is that of `torch._functorch.partitioners`).

From ZeRO stage 1 on a replica has its shard of the states alone, from stage 2 on of the gradients,
too, and under stage 3 of the parameters. Dense parameters have dp·cp replicas, experts edp.

The input of a frozen matrix is not kept (Transformer Engine, `linear.py`, `backward_needs_input`);
Megatron-Core's router keeps its own whatever trains (`RouterGatingLinearFunction`). An adapter
keeps its input and what A gives. With tensor ranks that share the sequence Megatron-Bridge keeps it
gathered before fused norms (`peft/utils.py`, `return_layernorm_output_gathered`). PEFT adds the
adapters of experts to their weights, and the sum waits for the backward pass, as do dequantized
weights (`ParamWrapper`; bitsandbytes, `nn/parametrize.py`).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from moetune.domain.architecture import Block, Part
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.optimizers import Optimizer
from moetune.domain.recurrent import StateSpace
from moetune.domain.targets import Target, find_target
from moetune.domain.training import FoldedLayout, TrainingDtype, TrainingJob
from moetune.domain.tuning import NF4_BYTES, ModelPart, Tuning, adapted_matrices
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
"""Bytes of an element of a GEMM's input, with its scales: as kept for the gradient of its weights,
and as tensor ranks gather it (Transformer Engine, distributed.py: `gather_along_first_dim`)."""


Counts: TypeAlias = tuple[float, float]
"""Parameters of a device: all but the experts, and the experts."""


class _Scope(NamedTuple):
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
    tuning: Tuning

    def of_input(self, part: Part, name: ModelPart) -> float:
        """Return the bytes of an element that a GEMM keeps for what of its weights trains."""
        if self.tuning.adapter(part) is not None:
            return ELEMENT
        return self.gemm * self.tuning.trains(name)

    def of_adapters(self, part: Part) -> float:
        """Return the bytes that a token's adapters of a part keep behind A."""
        adapters = self.tuning.adapter(part)
        if adapters is None or (self.target.merges_adapters and isinstance(part, RoutedExperts)):
            return 0.0
        matrices = adapted_matrices(part, fuses=self.target.core is not None)
        return ELEMENT * adapters.rank * sum(1 for _ in matrices)


def block_modules(
    block: Block, job: TrainingJob, layout: FoldedLayout, target: Target = AS_MEGATRON
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    "inputs" are those of the norms, which the residual sum needs anyway; "norms" what they write.
    """
    tokens = layout.micro_batch * job.length / (layout.cp * layout.tp)
    shared = tokens if target.splits_sequence else tokens * layout.tp
    scope = _Scope(target, layout, shared, tokens, GEMM_INPUT[job.dtype], job.tuning)
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
    norms = sum(_norm_bytes(part, scope) for part in block.parts)
    modules = {"inputs": ELEMENT * elements * len(block.parts), "norms": norms * elements}
    for part in block.parts:
        for name, size in _part_modules(part, job, scope).items():
            modules[name] = modules.get(name, 0.0) + size
    return modules


def _norm_bytes(part: Part, scope: _Scope) -> float:
    """Return the bytes of an element that is kept of the norm before a part.

    The router reads it in bfloat16; two projections to latent vectors keep 8 bits each.
    """
    if _norm_is_freed(part, scope.layout):
        return 0.0
    if isinstance(part, RoutedExperts):
        tuning, shared = scope.tuning, part.shared
        is_read = scope.target.core is not None or tuning.trains("router")
        is_read |= shared is not None and scope.of_input(shared, "shared_experts") > 0
        return ELEMENT * is_read
    if isinstance(part, LatentAttention):
        return min(ELEMENT, 2 * scope.of_input(part, "attention"))
    is_gathered = scope.tuning.adapter(part) is not None and scope.target.splits_sequence
    sharers = scope.layout.tp if is_gathered else 1
    return sharers * scope.of_input(part, "dense" if isinstance(part, DenseFfn) else "attention")


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
    shapes = (part.layer for part in job.decoder.routed_kinds if part is not None)
    rows = ((ELEMENT * shape.d_model, FULL * shape.num_experts) for shape in shapes)
    return 2 * tokens * max((sum(size) for size in rows), default=0.0)


def _part_modules(part: Part, job: TrainingJob, scope: _Scope) -> dict[str, float]:
    recompute = scope.layout.recompute
    if isinstance(part, DenseFfn):
        return {} if "mlp" in recompute else {"mlp": _ffn_bytes(part, scope, "dense")}
    if isinstance(part, RoutedExperts):
        if "moe" in recompute:
            return {}
        return _routed_modules(part, scope.tokens * most_rows(part, job, scope.layout), scope)
    widths = part.widths
    inner = sum(widths.values()) + _kept_inside(part)
    if isinstance(part, LatentAttention) and "mla_up_proj" in recompute:
        inner -= widths["q"] + widths["k"] + widths["v"] + _kept_inside(part)
    elif isinstance(part, LatentAttention) and not scope.of_input(part, "attention"):
        inner -= widths["q_latent"] + part.kv_rank
    # The output of recomputed core attention is the next projection's input, and kept all the same.
    heads: int = getattr(part, "num_heads", 0)
    element = scope.of_input(part, "attention")
    narrow = element * widths.get("output", 0) if element < ELEMENT else 0.0
    kept_inside = ELEMENT * inner + narrow + FULL * heads + scope.of_adapters(part)
    return {part.name: scope.tokens * kept_inside}


def _kept_inside(part: Part) -> int:
    """Return the elements of a token that a mixer keeps in addition to its widths.

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


def _ffn_bytes(part: DenseFfn, scope: _Scope, name: ModelPart) -> float:
    """Return what an FFN keeps: its up-projections, the factors of an activation, its result."""
    factors = part.is_gated and not scope.target.fuses_activations
    hidden = ELEMENT * (part.num_gemms - 1 + factors) + scope.of_input(part, name)
    return scope.tokens * (part.d_hidden * hidden + scope.of_adapters(part))


def most_rows(part: RoutedExperts, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the rows of the fullest rank for each token of a rank, as memory has to hold them."""
    return part.mean_top_k * job.skew(part, layout.ep).p99 * layout.etp


def _routed_modules(part: RoutedExperts, rows: float, scope: _Scope) -> dict[str, float]:
    target, layout, tokens = scope.target, scope.layout, scope.tokens
    by = target.kept_by_experts
    hidden = part.d_hidden / layout.etp
    width, element = ELEMENT * hidden * (part.num_gemms - 1), scope.of_input(part, "experts")
    if by.activations and "moe_act" not in layout.recompute:
        # The gate's result is a factor, and where rows are weighted here, their product is.
        factors = 0 if target.fuses_activations else part.is_gated + (not by.results)
        width += hidden * (element + ELEMENT * factors)
    modules = {
        "router": by.router_copies * FULL * tokens * part.num_experts,
        "experts": rows * (element * part.d_expert + width + scope.of_adapters(part)),
    }
    is_merged = target.merges_adapters and scope.tuning.adapter(part) is not None
    if is_merged or scope.tuning.base != "bfloat16":
        weights = part.num_experts * part.expert_parameters / (layout.ep * layout.etp)
        modules["weights of experts"] = ELEMENT * weights
    if by.results:
        modules["experts"] += ELEMENT * tokens * part.mean_top_k * part.d_expert
    if part.shared is not None and "shared_experts" not in layout.recompute:
        modules["shared_experts"] = _ffn_bytes(part.shared, scope, "shared_experts")
    return modules


def selective_modules(
    block: Block, layout: FoldedLayout, *, tokens: float, rows: float, d_model: int
) -> dict[str, float]:
    """Return a block's bytes by module, of a rank's tokens and rows that exchanges bring."""
    modules = {"inputs": ELEMENT * tokens * d_model}
    saves = True
    for part in block.parts:
        name, num_bytes = _name(part), 0.0
        for width in _widths(part, d_model):
            num_bytes += ELEMENT * tokens * width * saves
            saves = not saves
        if isinstance(part, RoutedExperts):
            num_bytes += 2 * ELEMENT * rows * part.d_expert
        elif not isinstance(part, DenseFfn):
            heads: int = getattr(part, "num_heads", 0)
            num_bytes += tokens * (ELEMENT * part.widths.get("output", 0) + FULL * heads)
        if layout.tp > 1:
            num_bytes += ELEMENT * tokens * d_model
        modules[name] = modules.get(name, 0.0) + num_bytes
    return modules


def _name(part: Part) -> str:
    if isinstance(part, DenseFfn):
        return "mlp"
    return "experts" if isinstance(part, RoutedExperts) else part.name


def _widths(part: Part, d_model: int) -> Iterator[int]:
    """Yield the outputs of a part's matrices, in the order of their GEMMs."""
    if isinstance(part, RoutedExperts):
        yield from () if part.shared is None else _widths(part.shared, d_model)
    elif isinstance(part, DenseFfn | LatentAttention):
        yield from (matrix.d_out for matrix in adapted_matrices(part, fuses=False))
    else:
        yield from (width for name, width in part.widths.items() if name != "output" and width)
        yield d_model


SHARDS_GRADIENTS = 2
"""The ZeRO stage, and those above it."""
WHOLE_BLOCKS = 2
"""Blocks of a sharded model that a device has at once: the one that is computed and the next.

Megatron-FSDP takes twice a block as the size of its queues (`suggested_communication_unit_size`).
"""


def shard_of(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp


def state_bytes(
    layout: FoldedLayout, optimizer: Optimizer, dense: float, experts: float, *, on_host: float
) -> tuple[float, float, float]:
    """Return the bytes of so many parameters, of their gradients, and of their states.

    FSDP2 shards float32 parameters at every stage. At stage 2 what it gathers stays for the whole
    step, and gradients of micro-batches are added up whole
    (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `unsharded_accumulated_grad`).

    Args:
        on_host: share of the optimizer that the host keeps.
    """
    count, shard, zero = dense + experts, shard_of(layout, dense, experts), layout.zero
    is_whole = zero <= SHARDS_GRADIENTS
    parameters = optimizer.parameter_bytes * (count if is_whole else shard)
    gradients = optimizer.gradient_bytes * (shard if zero >= SHARDS_GRADIENTS else count)
    if optimizer.updates_parameters and is_whole and zero:
        parameters = optimizer.parameter_bytes * shard + ELEMENT * count
        gradients += optimizer.gradient_bytes * count * (layout.pp > 1)
    return (
        parameters,
        gradients,
        (1 - on_host) * optimizer.state_bytes * (shard if zero else count),
    )


def frozen_bytes(
    job: TrainingJob, layout: FoldedLayout, optimizer: Optimizer, held: Counts, trained: Counts
) -> float:
    """Return the bytes of the parameters that do not train, which have no gradients and states.

    Below adapters they are in bfloat16; of a 4-bit base all but embedding, head, router and norms
    are in NF4.

    Args:
        held: parameters of the model on a device: all but the experts, and the experts.
        trained: those that train.
    """
    is_sharded = layout.zero > SHARDS_GRADIENTS
    if job.tuning.adapters is None:
        frozen = held[0] - trained[0], held[1] - trained[1]
        count = shard_of(layout, *frozen) if is_sharded else sum(frozen)
        return optimizer.parameter_bytes * count
    size = float(ELEMENT), float(ELEMENT)
    if job.tuning.base == "nf4":
        amounts = job.decoder.parameters
        rest = amounts.total - amounts.routed
        narrow = (amounts.attention + amounts.dense + amounts.shared) / rest
        size = ELEMENT + narrow * (NF4_BYTES - ELEMENT), NF4_BYTES
    dense, experts = size[0] * held[0], size[1] * held[1]
    return shard_of(layout, dense, experts) if is_sharded else dense + experts
