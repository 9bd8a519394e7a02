"""A layout as fields of Megatron-Core 0.16 to 0.19, by the class that has them.

Names and values of `TransformerConfig`, `DistributedDataParallelConfig`, `OptimizerConfig` and the
training loop; the command line and Megatron-Bridge write the same ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn
from moetune.domain.megatron_rules import hybrid_stages
from moetune.domain.optimizers import Optimizer, optimizer_of
from moetune.domain.recurrent import StateSpace
from moetune.domain.targets import MegatronCore
from moetune.domain.training import FoldedLayout, Recompute, TokenDispatcher
from moetune.export.planned import Planned

Value: TypeAlias = int | float | bool | str | tuple[str, ...] | tuple[int, ...] | None
Keys: TypeAlias = Mapping[str, str | Callable[[Any], Value]]
"""Fields of a runtime's class, each with the attribute whose value it has, or what makes it."""
_DISPATCHERS: Mapping[TokenDispatcher, str] = MappingProxyType(
    {"all_gather": "allgather", "all_to_all": "alltoall", "deepep": "flex", "hybrid_ep": "flex"}
)
_FLEX: Mapping[TokenDispatcher, str] = MappingProxyType(
    {"deepep": "deepep", "hybrid_ep": "hybridep"}
)
_NARROW: MappingProxyType[str, dict[str, Value]] = MappingProxyType(
    {
        "fp8": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    }
)
_SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_MOMENTS = MappingProxyType({4: "bf16", 8: "fp32"})
_FP32_BYTES = 4
_SHARED_CONNECTIONS = 32
GRAPHS_BY_MODULE: MegatronCore = (0, 18)
"""First core whose graphs of parts are `cuda_graph_modules`, and whose whole steps an own kind."""
_STASH: Mapping[str, Value] = MappingProxyType({
    "moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash_buffer_size_factor_cuda": 1.2, "moe_paged_stash_buffer_size_factor_cpu": 1.0,
    "use_transformer_engine_op_fuser": True,
})  # fmt: skip
"""Of whole steps with experts: Megatron-Bridge 0.6, `perf_recipes/qwen/common.py`."""
_FIRST_FSDP_STAGE = 2
_LAYOUT: Keys = MappingProxyType({
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "sequence_parallel": lambda layout: layout.tp > 1,
    "recompute_granularity": lambda layout: _granularity(layout.recompute),
    "recompute_method": lambda layout: "uniform" if "full" in layout.recompute else None,
    "recompute_num_layers": lambda layout: 1 if "full" in layout.recompute else None,
    "recompute_modules": lambda layout: _modules(layout.recompute),
    "overlap_moe_expert_parallel_comm": lambda layout: layout.overlap == "batch" or None,
    "delay_wgrad_compute": lambda layout: layout.overlap == "batch" or None,
    "cpu_offloading": lambda layout: layout.offload_activations > 0 or None,
    # else each rank makes all parameters before it shards them
    "init_model_with_meta_device": lambda layout: layout.zero > _FIRST_FSDP_STAGE or None,
})  # fmt: skip
"""Of `TransformerConfig`, by the attributes of a layout."""
_EXPERTS: Keys = MappingProxyType({
    "moe_token_dispatcher_type": lambda layout: _DISPATCHERS[layout.dispatcher],
    "moe_grouped_gemm": lambda _: True,
    "moe_flex_dispatcher_backend": lambda layout: _FLEX.get(layout.dispatcher),
    "moe_router_dtype": lambda layout: "fp32" if layout.dispatcher in _FLEX else None,
})  # fmt: skip
"""The same of models with experts."""
_DDP: Keys = MappingProxyType({
    "use_distributed_optimizer": lambda layout: layout.zero > 0,
    "use_megatron_fsdp": lambda layout: layout.zero >= _FIRST_FSDP_STAGE or None,
    "data_parallel_sharding_strategy":
        lambda layout: _SHARDING[layout.zero] if layout.zero >= _FIRST_FSDP_STAGE else None,
    "overlap_grad_reduce": lambda _: True,
    "overlap_param_gather": lambda layout: layout.zero > 0,
})  # fmt: skip
"""Of `DistributedDataParallelConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronValues:
    """Fields and their values.

    Args:
        model: of `TransformerConfig`.
        ddp: of `DistributedDataParallelConfig`.
        optimizer: of `OptimizerConfig`; dtypes as "fp32" and "bf16".
        reduces_in_fp32: whether gradients are added up and reduced in float32.
        keeps_remainders: whether the optimizer keeps no whole master copy.
        max_connections: of CUDA_DEVICE_MAX_CONNECTIONS.
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
    model = values_of(_LAYOUT, layout)
    if decoder.num_moe_layers:
        model |= values_of(_EXPERTS, layout)
    if layout.offload_activations:
        model["cpu_offloading_num_layers"] = layout.offloaded_layers(decoder)
    model |= _graphs(planned) | _exchanged_sequence(planned)
    if layout.pp > 1 and decoder.has_mamba:
        first, *_, last = hybrid_stages(layout, decoder)
        model["num_layers_in_first_pipeline_stage"] = first
        model["num_layers_in_last_pipeline_stage"] = last
    optimizer = optimizer_of(planned.job.optimizer)
    return MegatronValues(
        model=model | _NARROW.get(planned.job.dtype, {}), ddp=values_of(_DDP, layout),
        optimizer=_optimizer(optimizer) | _host_optimizer(layout.offload_optimizer),
        reduces_in_fp32=optimizer.gradient_bytes == _FP32_BYTES,
        keeps_remainders=optimizer.keeps_remainders, max_connections=_connections(layout),
    )  # fmt: skip


def stage_letters(planned: Planned) -> str:
    """Return the stages in the letters of `pipeline_model_parallel_layout`, such as "Et|t|tmL"."""
    return "|".join(planned.layout.stages_of(planned.decoder))


def _graphs(planned: Planned) -> dict[str, Value]:
    """Return the fields of CUDA graphs of parts of a block, or of a whole step."""
    by_module = planned.core >= GRAPHS_BY_MODULE
    scope = "cuda_graph_modules" if by_module else "cuda_graph_scope"
    match planned.layout.cuda_graphs:
        case "none":
            return {}
        case "partial":
            return {"cuda_graph_impl": "transformer_engine", scope: _captured(planned)}
        case "full" if not by_module:
            return {"cuda_graph_impl": "local", scope: ("full_iteration",)}
        case _:
            return {"cuda_graph_impl": "full_iteration", **_stash(planned)}


def _stash(planned: Planned) -> dict[str, Value]:
    """Return what bounds and keeps the rows of experts in graphs of whole steps."""
    routed = next((part for part in planned.decoder.routed_kinds if part is not None), None)
    if routed is None:
        return {}
    is_squared = routed.function == "relu2"
    return {**_STASH, **({"use_fused_weighted_squared_relu": True} if is_squared else {})}


def _exchanged_sequence(planned: Planned) -> dict[str, Value]:
    """Return how ranks that share sequences exchange them where not in a ring of keys."""
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


def _captured(planned: Planned) -> tuple[str, ...]:
    """Return what is captured: all but the exchanges and the experts.

    Dense FFNs are no graphs of their own beside overlap of exchanges (`transformer_config.py`).
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


def _granularity(modules: tuple[Recompute, ...]) -> str | None:
    if not modules:
        return None
    return "full" if "full" in modules else "selective"


def _modules(modules: tuple[Recompute, ...]) -> tuple[str, ...] | None:
    names = tuple("layernorm" if name == "norm" else name for name in modules)
    return None if "full" in names else names or None


def _optimizer(optimizer: Optimizer) -> dict[str, Value]:
    if not optimizer.is_precision_aware:
        return {}
    moments = _MOMENTS[optimizer.moment_bytes]
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": "bf16",
        "main_params_dtype": "fp32",
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }


def _host_optimizer(share: float) -> dict[str, Value]:
    """Return the fields of a share on the host, which the precision-aware code computes."""
    if not share:
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": str(share),
        "overlap_cpu_optimizer_d2h_h2d": True,
    }


def _connections(layout: FoldedLayout) -> int:
    """Return 1, so that kernels start in their order, but where several streams must run.

    Megatron asks for 1 with tensor or context parallelism before Blackwell, for more with its
    overlap of exchanges, and refuses 1 with FSDP.
    """
    runs_streams = layout.overlap == "batch" or layout.zero >= _FIRST_FSDP_STAGE
    return _SHARED_CONNECTIONS if runs_streams else 1
