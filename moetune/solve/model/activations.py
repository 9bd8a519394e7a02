"""Bytes of one block's activations that a rank saves for its backward pass, and of its states.

The tensors are those that Megatron-Core with Transformer Engine saves in bfloat16, with
FlashAttention (no scores); those of routed experts are the target's. A recomputed module saves its
inputs alone. 8-bit GEMMs save only their quantized inputs (`te.pytorch.module.linear`).

torchtitan's selective recomputation saves a block's input, the output of every second matrix, the
output of attention, and the results of exchanges and tensor-parallel reductions. Grouped GEMMs of
experts are computed again (`torchtitan/distributed/activation_checkpoint.py`, `SelectiveAC`, with
the list of operations of `torch._functorch.partitioners`).

A replica holds its shard of the states from ZeRO stage 1 on, of the gradients from stage 2 on, and
of the parameters under stage 3. Dense parameters have dp·cp replicas, experts edp.

The input of a frozen matrix is not saved (Transformer Engine, `linear.py`, `backward_needs_input`).
Megatron-Core's router always saves its input (`RouterGatingLinearFunction`). An adapter saves its
input and the output of A. Under sequence parallelism Megatron-Bridge saves that input gathered
before fused norms (`peft/utils.py`, `return_layernorm_output_gathered`). PEFT adds experts'
adapters to their weights. The sum is kept until the backward pass, as are dequantized weights
(`ParamWrapper`; bitsandbytes, `nn/parametrize.py`).
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
"""Bytes of an element of a GEMM's input, with its scales, as saved for the gradient of its weights
and as tensor ranks gather it (Transformer Engine, distributed.py: `gather_along_first_dim`)."""


Counts: TypeAlias = tuple[float, float]
"""Parameters of a device: all except the experts, and the experts."""


class _Scope(NamedTuple):
    """Inputs that set the bytes of a block's modules: layout, tokens, and bytes of a GEMM's input.

    Args:
        shared: tokens whose residual sums and norms a rank has.
        tokens: tokens of full width that equal a rank's cut heads and widths.
    """

    target: Target
    layout: FoldedLayout
    shared: float
    tokens: float
    gemm: float
    tuning: Tuning

    def of_input(self, part: Part, name: ModelPart) -> float:
        """Return the bytes of an element that a GEMM saves for the gradients of its weights."""
        if self.tuning.adapter(part) is not None:
            return ELEMENT
        return self.gemm * self.tuning.trains(name)

    def of_adapters(self, part: Part) -> float:
        """Return the bytes of each token that a part's adapters save behind A."""
        adapters = self.tuning.adapter(part)
        if adapters is None or (self.target.merges_adapters and isinstance(part, RoutedExperts)):
            return 0.0
        matrices = adapted_matrices(part, fuses=self.target.core is not None)
        return ELEMENT * adapters.rank * sum(1 for _ in matrices)


def block_modules(
    block: Block, job: TrainingJob, layout: FoldedLayout, target: Target = AS_MEGATRON
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    "inputs" are the inputs of norms, which the residual sum needs anyway; "norms" their outputs.
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
    """Return the saved bytes of each output element of the norm before a part.

    The router reads it in bfloat16; two projections to latent vectors save 8 bits each.
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

    The norm is a separate module only before latent attention and routed experts. Transformer
    Engine fuses it into other projections, and Megatron-Core cannot drop the output of a fused norm
    alone (`gpt_layer_specs.py`, `mamba_layer_specs.py`).
    """
    if isinstance(part, DenseFfn):
        return "mlp" in layout.recompute
    return "norm" in layout.recompute and isinstance(part, LatentAttention | RoutedExperts)


def workspace_bytes(block: Block, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the bytes of a block's widest gradients during its backward pass."""
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
    """Return the bytes of HybridEP's buffers, which are allocated outside the allocator.

    It has a buffer for the dispatch and another for the combine, each with rows for all ranks'
    tokens (DeepEP, branch hybrid-ep, `csrc/hybrid_ep/hybrid_ep.cu`,
    `max_num_of_tokens_for_experts`).
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
    # The output of recomputed core attention is saved anyway, as the next projection's input.
    heads: int = getattr(part, "num_heads", 0)
    element = scope.of_input(part, "attention")
    narrow = element * widths.get("output", 0) if element < ELEMENT else 0.0
    kept_inside = ELEMENT * inner + narrow + FULL * heads + scope.of_adapters(part)
    return {part.name: scope.tokens * kept_inside}


def _kept_inside(part: Part) -> int:
    """Return the elements per token that a mixer saves in addition to its widths.

    Norms of queries, keys and latent vectors save their input. Mamba-2's scan saves its output
    before the gate, and the norm behind it the output after the gate (mamba_ssm,
    `ssd_combined.py`).
    """
    if isinstance(part, LatentAttention):
        return (part.q_rank or 0) + part.kv_rank
    if isinstance(part, GroupedQueryAttention) and part.norm_parameters:
        return part.widths["q"] + part.widths["k"]
    if isinstance(part, StateSpace) and not part.rank:
        return 2 * part.d_inner
    return 0


def _ffn_bytes(part: DenseFfn, scope: _Scope, name: ModelPart) -> float:
    """Return the bytes that an FFN saves: up-projections, factors of the activation, its result."""
    factors = part.is_gated and not scope.target.fuses_activations
    hidden = ELEMENT * (part.num_gemms - 1 + factors) + scope.of_input(part, name)
    return scope.tokens * (part.d_hidden * hidden + scope.of_adapters(part))


def most_rows(part: RoutedExperts, job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the fullest rank's rows for each token of a rank, as memory has to hold them."""
    return part.mean_top_k * job.skew(part, layout.ep).p99 * layout.etp


def _routed_modules(part: RoutedExperts, rows: float, scope: _Scope) -> dict[str, float]:
    target, layout, tokens = scope.target, scope.layout, scope.tokens
    by = target.kept_by_experts
    hidden = part.d_hidden / layout.etp
    width, element = ELEMENT * hidden * (part.num_gemms - 1), scope.of_input(part, "experts")
    if by.activations and "moe_act" not in layout.recompute:
        # The gate's result is a factor; if rows are weighted here, so is their product.
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
    """Return a block's bytes by module, for a rank's tokens and the rows from exchanges."""
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
    """Yield the output widths of a part's matrices, in the order of their GEMMs."""
    if isinstance(part, RoutedExperts):
        yield from () if part.shared is None else _widths(part.shared, d_model)
    elif isinstance(part, DenseFfn | LatentAttention):
        yield from (matrix.d_out for matrix in adapted_matrices(part, fuses=False))
    else:
        yield from (width for name, width in part.widths.items() if name != "output" and width)
        yield d_model


SHARDS_GRADIENTS = 2
"""The lowest ZeRO stage that shards gradients."""
WHOLE_BLOCKS = 2
"""Blocks of a sharded model that a device gathers at once: the computed block and the next.

Megatron-FSDP sizes its queues for two blocks (`suggested_communication_unit_size`).
"""


def shard_of(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the number of parameters in a replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp


def state_bytes(
    layout: FoldedLayout, optimizer: Optimizer, dense: float, experts: float, *, on_host: float
) -> tuple[float, float, float]:
    """Return the bytes of parameters, of their gradients, and of their optimizer states.

    FSDP2 shards float32 parameters at every stage. At stage 2 gathered parameters stay for the
    whole step, and gradients of micro-batches accumulate unsharded
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
    """Return the bytes of frozen parameters, which have no gradients and no optimizer states.

    Below adapters they are in bfloat16. In a 4-bit base all except embedding, head, router and
    norms is in NF4.

    Args:
        held: parameters of the model on a device: all except the experts, and the experts.
        trained: the parameters that train, likewise.
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
