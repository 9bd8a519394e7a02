"""A layout as fields of Megatron-Core 0.16 to 0.19, by the class that has them.

The fields are those of `TransformerConfig`, `DistributedDataParallelConfig`, `OptimizerConfig` and
the training loop. The exports for Megatron-LM's command line and Megatron-Bridge share them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn
from moetune.domain.megatron_rules import hybrid_stages
from moetune.domain.optimizers import optimizer_of
from moetune.domain.recurrent import StateSpace
from moetune.domain.targets import MegatronCore
from moetune.domain.training import (
    RECOMPUTES,
    CudaGraphs,
    Overlap,
    Recompute,
    TokenDispatcher,
    TrainingDtype,
    ZeroStage,
)
from moetune.export.keys import Setting, Value, size, switch, write_keys
from moetune.export.megatron_optimizer import OPTIMIZER
from moetune.export.planned import Planned

Keys: TypeAlias = Mapping[str, str | Callable[[Any], Value]]
"""Fields of a runtime's class, each with an attribute's name or a function for its value."""
_DISPATCHERS: Mapping[TokenDispatcher, tuple[str, str | None]] = MappingProxyType({
    "all_gather": ("allgather", None), "all_to_all": ("alltoall", None),
    "deepep": ("flex", "deepep"), "hybrid_ep": ("flex", "hybridep"),
})  # fmt: skip
"""Megatron's dispatcher type and flex backend of each token dispatcher."""
_NARROW: Mapping[TrainingDtype, tuple[Value, ...]] = MappingProxyType({
    "fp8": ("e4m3", "blockwise", None, None), "mxfp8": ("e4m3", "mxfp8", None, None),
    "nvfp4": (None, None, "e2m1", "nvfp4"),
})  # fmt: skip
_SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_FP32_BYTES = 4
SHARED_CONNECTIONS = 32
GRAPHS_BY_MODULE: MegatronCore = (0, 18)
"""First core with `cuda_graph_modules` for partial graphs and `full_iteration` for whole steps."""
_STASH: Mapping[str, Value] = MappingProxyType({
    "moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash_buffer_size_factor_cuda": 1.2, "moe_paged_stash_buffer_size_factor_cpu": 1.0,
    "use_transformer_engine_op_fuser": True,
})  # fmt: skip
"""Fields for CUDA graphs of whole steps with experts: Megatron-Bridge 0.6,
`perf_recipes/qwen/common.py`."""
_FIRST_FSDP_STAGE = 2


def _write_recompute(planned: Planned) -> tuple[Value, ...]:
    modules = planned.layout.recompute
    if "full" in modules:
        return "full", "uniform", 1, None
    names = tuple("layernorm" if name == "norm" else name for name in modules)
    return ("selective", None, None, names) if names else (None, None, None, None)


def _read_recompute(
    granularity: str | None, _: object, __: object, modules: tuple[str, ...]
) -> tuple[Recompute, ...]:
    """Return the recomputed modules; without a granularity their list means nothing."""
    if granularity != "selective":
        return ("full",) if granularity == "full" else ()
    names = {"norm" if name == "layernorm" else name for name in modules}
    return tuple(module for module in RECOMPUTES if module in names)


def _read_dispatcher(kind: str, backend: str) -> TokenDispatcher | None:
    for dispatcher, (name, flexible) in _DISPATCHERS.items():
        if kind == name and flexible in (None, backend):
            return dispatcher
    return None


def _write_overlap(planned: Planned) -> tuple[Value, ...]:
    return (True, True) if planned.layout.overlap == "batch" else (None, None)


def _read_overlap(overlaps: object, _: object) -> Overlap:
    return "batch" if overlaps else "none"


def _write_offloaded(planned: Planned) -> tuple[Value, ...]:
    share = planned.layout.offload_activations
    return (True, planned.layout.offloaded_layers(planned.decoder)) if share else (None, None)


def _write_zero(planned: Planned) -> tuple[Value, ...]:
    zero = planned.layout.zero
    is_fsdp = zero >= _FIRST_FSDP_STAGE
    return zero > 0, True if is_fsdp else None, _SHARDING[zero] if is_fsdp else None


def _read_zero(is_distributed: object, is_fsdp: object, strategy: str) -> ZeroStage:
    if is_fsdp:
        stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
        return stages[_SHARDING.index(strategy)] if strategy in _SHARDING else 3
    return 1 if is_distributed else 0


def _read_graphs(
    kind: str, modules: tuple[str, ...] | None, scope: tuple[str, ...] | None
) -> CudaGraphs:
    if kind == "none":
        return "none"
    is_whole = kind == "full_iteration" or "full_iteration" in (*(modules or ()), *(scope or ()))
    return "full" if is_whole else "partial"


def _write_half(planned: Planned) -> tuple[Value, ...]:
    """Return the dtype flags; Megatron accumulates bfloat16 gradients in float32 by default."""
    if planned.job.dtype != "float16":
        return True, None, None
    gradient_bytes = optimizer_of(planned.job.optimizer).gradient_bytes
    return None, True, True if gradient_bytes == _FP32_BYTES else None


def _write_narrow(planned: Planned) -> tuple[Value, ...]:
    return _NARROW.get(planned.job.dtype, (None, None, None, None))


def _read_narrow(fp8: object, recipe: str, fp4: object, _: object) -> TrainingDtype | None:
    if fp4:
        return "nvfp4"
    return ("mxfp8" if recipe == "mxfp8" else "fp8") if fp8 else None


def _write_graphs(planned: Planned) -> tuple[Value, ...]:
    """Return the fields of CUDA graphs of parts of a block, or of a whole step."""
    by_module = planned.core >= GRAPHS_BY_MODULE
    match planned.layout.cuda_graphs:
        case "none":
            return None, None, None
        case "partial":
            names = _captured_modules(planned)
            return "transformer_engine", names if by_module else None, None if by_module else names
        case _:
            return ("full_iteration", None, None) if by_module else ("local", None, _WHOLE_STEP)


_WHOLE_STEP = ("full_iteration",)
LAYOUT = (
    size("tp", "tensor_model_parallel_size"),
    size("pp", "pipeline_model_parallel_size"),
    size("cp", "context_parallel_size"),
    size("ep", "expert_model_parallel_size"),
    size("etp", "expert_tensor_parallel_size", None),  # as tp
    switch("splits_sequence", "sequence_parallel", lambda planned: planned.layout.tp > 1,
           default=False),
    Setting(
        name="recompute", write=_write_recompute, read=_read_recompute,
        keys={"recompute_granularity": None, "recompute_method": None,
              "recompute_num_layers": None, "recompute_modules": ("core_attn",)},
    ),
    Setting(
        name="overlap", write=_write_overlap, read=_read_overlap,
        keys={"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    ),
    Setting(
        name="offload_activations", write=_write_offloaded, read=lambda _, layers: layers,
        keys={"cpu_offloading": False, "cpu_offloading_num_layers": 0},
    ),
    # else each rank makes all parameters before it shards them
    Setting(
        name="init_model_with_meta_device", keys={"init_model_with_meta_device": False}, read=bool,
        write=lambda planned: (True if planned.layout.zero > _FIRST_FSDP_STAGE else None,),
    ),
    Setting(
        name="cuda_graphs", write=_write_graphs, read=_read_graphs,
        keys={"cuda_graph_impl": "none", "cuda_graph_modules": (), "cuda_graph_scope": ()},
    ),
)  # fmt: skip
"""Settings of `TransformerConfig`."""
EXPERTS = (
    Setting(
        name="dispatcher", write=lambda planned: _DISPATCHERS[planned.layout.dispatcher],
        read=_read_dispatcher,
        keys={"moe_token_dispatcher_type": "allgather", "moe_flex_dispatcher_backend": "deepep"},
    ),
    switch("groups_experts", "moe_grouped_gemm", lambda _: True, default=False),
    # prices assume it: the public runs are of recipes that set it (`BlockPrices._permute`)
    switch("fuses_rows", "moe_permute_fusion", lambda _: True, default=False),
    Setting(
        name="moe_router_dtype", keys={"moe_router_dtype": None}, read=lambda dtype: dtype,
        write=lambda planned: ("fp32" if _DISPATCHERS[planned.layout.dispatcher][1] else None,),
    ),
)  # fmt: skip
"""Settings of `TransformerConfig` for models with experts."""
NARROW = (
    Setting(
        name="narrow", write=_write_narrow, read=_read_narrow,
        keys={"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4"},
    ),
)  # fmt: skip
"""Settings of `TransformerConfig` for GEMMs in 8 bits or fewer."""
DDP = (
    Setting(
        name="zero", write=_write_zero, read=_read_zero,
        keys={"use_distributed_optimizer": False, "use_megatron_fsdp": False,
              "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    switch("hides_gradients", "overlap_grad_reduce", lambda _: True, default=False),
    switch("hides_parameters", "overlap_param_gather",
           lambda planned: planned.layout.zero > 0 and planned.job.optimizer != "muon",
           default=False),
)  # fmt: skip
"""Settings of `DistributedDataParallelConfig`."""
JOB = (
    size("micro_batch", "micro_batch_size", None),
    size("global_batch", "global_batch_size", None),
    size("length", "seq_length", None),
    Setting(
        name="half", write=_write_half, read=lambda _, is_half, __: "float16" if is_half else None,
        keys={"bf16": False, "fp16": False, "accumulate_allreduce_grads_in_fp32": False},
    ),
)  # fmt: skip
"""Settings of the training loop."""
SETTINGS = (*LAYOUT, *EXPERTS, *NARROW, *DDP, *OPTIMIZER, *JOB)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronValues:
    """Megatron's fields for a layout, with their values.

    Args:
        model: fields of `TransformerConfig`.
        ddp: fields of `DistributedDataParallelConfig`.
        optimizer: fields of `OptimizerConfig`; dtypes as "fp32" and "bf16".
        reduces_in_fp32: whether gradients are accumulated and reduced in float32.
        keeps_remainders: whether the optimizer stores remainders instead of a whole master copy.
        max_connections: value of CUDA_DEVICE_MAX_CONNECTIONS.
    """

    model: dict[str, Value]
    ddp: dict[str, Value]
    optimizer: dict[str, Value]
    reduces_in_fp32: bool
    keeps_remainders: bool
    max_connections: int


def values_of(keys: Keys, source: object) -> dict[str, Value]:
    """Return the fields of an object; those without a value are left out."""
    values = (
        (key, attrgetter(made)(source) if isinstance(made, str) else made(source))
        for key, made in keys.items()
    )
    return {key: value for key, value in values if value is not None}


def megatron_values(planned: Planned) -> MegatronValues:
    """Return the fields that make Megatron run the layout."""
    layout, decoder = planned.layout, planned.decoder
    model = write_keys(LAYOUT, planned)
    if decoder.num_moe_layers:
        model |= write_keys(EXPERTS, planned)
    if layout.cuda_graphs == "full" and planned.core >= GRAPHS_BY_MODULE:
        model |= _stash(planned)
    model |= _exchanged_sequence(planned)
    if layout.pp > 1 and decoder.has_mamba:
        first, *_, last = hybrid_stages(layout, decoder)
        model["num_layers_in_first_pipeline_stage"] = first
        model["num_layers_in_last_pipeline_stage"] = last
    optimizer = optimizer_of(planned.job.optimizer)
    return MegatronValues(
        model=model | write_keys(NARROW, planned), ddp=write_keys(DDP, planned),
        optimizer=write_keys(OPTIMIZER, planned),
        reduces_in_fp32=optimizer.gradient_bytes == _FP32_BYTES,
        keeps_remainders=optimizer.keeps_remainders, max_connections=_connections(planned),
    )  # fmt: skip


def stage_letters(planned: Planned) -> str:
    """Return the stages in the letters of `pipeline_model_parallel_layout`, such as "Et|t|tmL"."""
    return "|".join(planned.layout.stages_of(planned.decoder))


def _stash(planned: Planned) -> dict[str, Value]:
    """Return the fields that bound and stash the experts' rows in CUDA graphs of whole steps."""
    routed = next((part for part in planned.decoder.routed_kinds if part is not None), None)
    if routed is None:
        return {}
    is_squared = routed.function == "relu2"
    return {**_STASH, **({"use_fused_weighted_squared_relu": True} if is_squared else {})}


def _exchanged_sequence(planned: Planned) -> dict[str, Value]:
    """Return `cp_comm_type` for attention that context parallelism cannot run as a ring of keys."""
    if planned.layout.cp == 1:
        return {}
    for mixer in planned.decoder.mixers:
        match mixer:
            case GroupedQueryAttention() if mixer.window is not None or mixer.num_sinks:
                return {"cp_comm_type": "a2a"}
            case LatentAttention() if mixer.indexer is not None:
                return {"cp_comm_type": "allgather"}
            case _:
                continue
    return {}


def _captured_modules(planned: Planned) -> tuple[str, ...]:
    """Return the modules that CUDA graphs capture: all except the exchanges and the experts.

    Dense FFNs are not captured when exchanges are overlapped (`transformer_config.py`).
    """
    parts = [part for kind in planned.decoder.kinds for part in kind.parts]
    modules = ["attn"]
    if any(isinstance(part, StateSpace) for part in parts):
        modules.append("mamba")
    if planned.layout.overlap != "batch" and any(isinstance(part, DenseFfn) for part in parts):
        modules.append("mlp")
    if planned.decoder.num_moe_layers:
        modules += ["moe_router", "moe_preprocess"]
    return tuple(modules)


def _connections(planned: Planned) -> int:
    """Return 1, which keeps kernels in launch order, unless several streams must run.

    Megatron asks for 1 with tensor or context parallelism before Blackwell. It asks for more with
    overlapped exchanges, and refuses 1 with FSDP.
    """
    layout = planned.layout
    runs_streams = layout.overlap == "batch" or layout.zero >= _FIRST_FSDP_STAGE
    return SHARED_CONNECTIONS if runs_streams else 1
