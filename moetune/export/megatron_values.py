"""A layout as fields of Megatron-Core 0.16 to 0.19, by the class that has them.

Names and values of `TransformerConfig`, `DistributedDataParallelConfig`, `OptimizerConfig` and the
training loop; the command line and Megatron-Bridge write the same ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn
from moetune.domain.megatron_rules import hybrid_stages
from moetune.domain.optimizers import Optimizer, optimizer_of
from moetune.domain.recurrent import StateSpace
from moetune.domain.training import Recompute, TokenDispatcher
from moetune.export.megatron_model import Value
from moetune.export.planned import Planned

_DISPATCHERS: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
    {"all_gather": "allgather", "all_to_all": "alltoall", "deepep": "flex", "hybrid_ep": "flex"}
)
_FLEX: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
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
_GRAPHS_BY_MODULE = (0, 18)
"""First core whose graphs of parts are `cuda_graph_modules`, and whose whole steps an own kind."""
_STASH: Mapping[str, Value] = MappingProxyType({
    "moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash_buffer_size_factor_cuda": 1.2, "moe_paged_stash_buffer_size_factor_cpu": 1.0,
    "use_transformer_engine_op_fuser": True,
})  # fmt: skip
"""Of whole steps with experts: Megatron-Bridge 0.6, `perf_recipes/qwen/common.py`."""
_FIRST_FSDP_STAGE = 2


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


def megatron_values(planned: Planned) -> MegatronValues:
    """Return the fields that make Megatron run the layout."""
    layout = planned.layout
    model: dict[str, Value] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1,
        **_dispatch(planned),
        **_recompute(layout.recompute),
    }
    if layout.overlap == "batch":
        model |= {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if layout.offload_activations:
        layers = layout.offloaded_layers(planned.decoder)
        model |= {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
    model |= _graphs(planned) | _exchanged_sequence(planned)
    if layout.zero > _FIRST_FSDP_STAGE:  # else each rank makes all parameters before it shards them
        model["init_model_with_meta_device"] = True
    if layout.pp > 1 and planned.decoder.has_mamba:
        sizes = hybrid_stages(layout, planned.decoder)
        model |= {
            "num_layers_in_first_pipeline_stage": sizes[0],
            "num_layers_in_last_pipeline_stage": sizes[-1],
        }
    model |= _NARROW.get(planned.job.dtype, {})
    optimizer = optimizer_of(planned.job.optimizer)
    return MegatronValues(
        model=model, ddp=_sharding(planned),
        optimizer=_optimizer(optimizer) | _host_optimizer(layout.offload_optimizer),
        reduces_in_fp32=optimizer.gradient_bytes == _FP32_BYTES,
        keeps_remainders=optimizer.keeps_remainders, max_connections=_connections(planned),
    )  # fmt: skip


def stage_letters(planned: Planned) -> str:
    """Return the stages in the letters of `pipeline_model_parallel_layout`, such as "Et|t|tmL"."""
    return "|".join(planned.layout.stages_of(planned.decoder))


def _dispatch(planned: Planned) -> dict[str, Value]:
    if not planned.decoder.num_moe_layers:
        return {}
    name = planned.layout.dispatcher
    found: dict[str, Value] = {
        "moe_token_dispatcher_type": _DISPATCHERS[name],
        "moe_grouped_gemm": True,
    }
    if name in _FLEX:
        found |= {"moe_flex_dispatcher_backend": _FLEX[name], "moe_router_dtype": "fp32"}
    return found


def _graphs(planned: Planned) -> dict[str, Value]:
    """Return the fields of CUDA graphs of parts of a block, or of a whole step."""
    by_module = planned.core >= _GRAPHS_BY_MODULE
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
    found = ["attn"]
    if any(isinstance(part, StateSpace) for part in parts):
        found.append("mamba")
    if planned.layout.overlap != "batch" and any(isinstance(part, DenseFfn) for part in parts):
        found.append("mlp")
    if planned.decoder.num_moe_layers:
        found += ["moe_router", "moe_preprocess"]
    return tuple(found)


def _recompute(modules: tuple[Recompute, ...]) -> dict[str, Value]:
    if "full" in modules:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if not modules:
        return {}
    names = tuple("layernorm" if name == "norm" else name for name in modules)
    return {"recompute_granularity": "selective", "recompute_modules": names}


def _sharding(planned: Planned) -> dict[str, Value]:
    stage = planned.layout.zero
    found: dict[str, Value] = {"use_distributed_optimizer": stage > 0}
    if stage >= _FIRST_FSDP_STAGE:
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _SHARDING[stage]}
    return found | {"overlap_grad_reduce": True, "overlap_param_gather": stage > 0}


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


def _connections(planned: Planned) -> int:
    """Return 1, so that kernels start in their order, but where several streams must run.

    Megatron asks for 1 with tensor or context parallelism before Blackwell, for more with its
    overlap of exchanges, and refuses 1 with FSDP.
    """
    layout = planned.layout
    if layout.overlap == "batch" or layout.zero >= _FIRST_FSDP_STAGE:
        return _SHARED_CONNECTIONS
    return 1
