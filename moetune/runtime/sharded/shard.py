"""`moetune.shard`: put a model and its optimizer's states into chunks (Elixir) by FSDP2.

It packs modules (`units`) and shards each chunk by `fully_shard`. The `cache` decides when FSDP2
gathers and frees the chunks (`model_chunks`). From then on the optimizer steps the shards.
"""

import os
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import SGD, Adam, AdamW, Optimizer

from moetune.comm.agree import agree
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.chunks import FEWEST_PLACES
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.fsdp import shard_experts
from moetune.runtime.replicas import spread_layers
from moetune.runtime.sharded.cache import Cache, GatheredChunk
from moetune.runtime.sharded.model_chunks import ModelChunks
from moetune.runtime.sharded.options import (
    CHUNK_BYTES,
    ShardOptions,
    check_host_memory,
    planned_options,
)
from moetune.runtime.sharded.units import Unit, find_units, in_chunks

_KINDS = (Adam, AdamW, SGD)


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    chunk_bytes: int | None = None,
    cache_bytes: int | None = None,
    offload: bool = False,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Put a model's states into chunks, in place, and return it with its optimizer.

    Modules have whole parameters when they run; each rank holds 1 / ranks of all states, as
    DTensors. Gradients are means over the ranks of `group`, even for a `MoELayer`'s experts, so
    that steps equal steps on the whole batch. They are summed in float32 at least. Clip them with
    `moetune.clip_grad_norm_`.

    Args:
        optimizer: a fresh Adam, AdamW or SGD over parameters of the model, which become shards.
        chunk_bytes: consecutive modules travel together up to this size; the default is 32 MiB.
        cache_bytes: bytes of gathered chunks on the device, at least two; the default is all
            chunks.
        offload: shards, gradients and optimizer states are in host memory; a GPU's shards are in
            pinned memory.
        group: data-parallel group; the default is the world. It contains the expert-parallel
            groups, and no two ranks of a tensor-parallel group.
        device: device of the computation, the process's current GPU or "cpu"; the default is the
            parameters' device.
        plan: a plan with chunks, or the path of its file; it sets chunk_bytes, cache_bytes and
            offload. Every rank gives the same plan.

    Raises:
        InputError: there is no process group; the cache is smaller than two chunks; the optimizer
            is of another kind or model; the model is sharded already; or the plan has no chunks, or
            is for another model or number of ranks.
        RankMismatchError: the ranks have different models, options or plans, or some ranks have
            an InputError; on all ranks.
        AllocationError: the host lacks memory for the offloaded states.
    """
    _check_torch()
    replicas, parameters = communicator_of(group), dict(model.named_parameters())

    def usable_options() -> ShardOptions:
        given = ShardOptions(
            chunk_bytes=CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
            cache_bytes=cache_bytes, offload=offload,
        )  # fmt: skip
        _check_plain(model)
        _check_optimizer(optimizer, parameters)
        if plan is None:
            return given
        return planned_options(plan, model, replicas.num_ranks, given=given)

    described = [*map(_described, parameters.items())]
    options = agree(
        replicas, usable_options, lambda options: [str(options), *described], "moetune.shard"
    )
    target = next(iter(parameters.values())).device if device is None else torch.device(device)
    _check_current(target)
    policy = _offload_policy(model, optimizer, options, replicas, target)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names[id(value)] for value in some["params"]] for some in optimizer.param_groups]
    mesh = DeviceMesh.from_group(group or _world(), target.type, mesh_dim_names=("shard",))
    held = _in_chunks(model, options, mesh, replicas, policy)
    _give_shards(optimizer, groups, dict(model.named_parameters()))
    optimizer.register_step_pre_hook(lambda *_: held.agree())
    optimizer.register_step_post_hook(lambda *_: held.end_step())
    return model, optimizer


def _offload_policy(
    model: nn.Module,
    optimizer: Optimizer,
    options: ShardOptions,
    replicas: Communicator,
    device: torch.device,
) -> OffloadPolicy:
    """Return the policy for where shards are, once all hosts have memory for them."""
    if not options.offload:
        return OffloadPolicy()
    pins = device.type != "cpu"
    check_host_memory(model, replicas, num_states=_num_states(optimizer), pins=pins)
    return CPUOffloadPolicy(pin_memory=pins)


def _check_torch() -> None:
    """Raise InputError if torch has no process group, or no FSDP2 whose chunks can have gaps."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "moetune.shard needs a process group, also for a single rank",
            "call torch.distributed.init_process_group() before",
        )
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise InputError(
            f"moetune.shard needs torch 2.13, and this is {torch.__version__}: FSDP2 of before "
            "takes modules of a group for lost where a pass leaves some out",
            "update torch, or use moetune.prepare_fsdp and fully_shard",
        )


def _check_current(device: torch.device) -> None:
    """Raise InputError unless FSDP2 computes on the device: it uses the process's current GPU."""
    if device.type == "cuda" and device.index not in {None, torch.cuda.current_device()}:
        raise InputError(
            f"the model is on {device}, and this process's current GPU is "
            f"cuda:{torch.cuda.current_device()}",
            f"call torch.cuda.set_device({device.index}) before",
        )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # noqa: S101 - there is a process group
    return world


def _described(named: tuple[str, nn.Parameter]) -> str:
    name, parameter = named
    return f"{name}: {tuple(parameter.shape)} {parameter.dtype} trainable {parameter.requires_grad}"


def _check_plain(model: nn.Module) -> None:
    """Raise InputError if parameters are sharded already, or a plan has placed experts."""
    name = next((name for name, value in model.named_parameters() if is_dtensor(value)), None)
    if name is not None:
        raise InputError(
            f"{name} is sharded already: it is a DTensor",
            "use either moetune.shard or fully_shard and moetune.prepare_fsdp",
        )
    for _, layer in spread_layers(model):
        layer.experts.placement.check_natural("moetune.shard")


def _in_chunks(
    model: nn.Module,
    options: ShardOptions,
    mesh: DeviceMesh,
    replicas: Communicator,
    offload_policy: OffloadPolicy,
) -> ModelChunks:
    """Shard a model's modules and experts; from now on the chunks' cache controls the gathering."""
    layers = [layer for _, layer in spread_layers(model)]
    experts = {parameter for layer in layers for parameter in layer.experts.parameters()}
    chunks = _packed(model, layers, experts, options, replicas)
    units = [unit for chunk in chunks for unit in chunk.units]
    named = {unit.name: {*unit.parameters.values()} for unit in units}
    rest = {*model.parameters()} - experts.union(*named.values())
    _check_dtypes({**named, "the model itself": rest, "the layers of experts": experts})
    held = ModelChunks(model, Cache(chunks, _capacity(chunks, options)), replicas)
    for chunk in chunks:
        held.watch_backward(chunk)

    def sharded(modules: nn.Module | list[nn.Module], mine: set[nn.Parameter]) -> None:
        ignored = {*model.parameters()} - mine
        how = {"mp_policy": _policy(mine), "offload_policy": offload_policy}
        fully_shard(modules, mesh=mesh, ignored_params=ignored, **how)  # type: ignore[call-overload] # either kind

    how = {"mp_policy": _policy(experts), "offload_policy": offload_policy}
    shard_experts(model, mesh, how, keeps_placed=False)
    for chunk in reversed(chunks):  # inner modules before outer modules
        if not isinstance(chunk.units[0].module, FSDPModule):
            mine = [named[unit.name] for unit in chunk.units]
            sharded([unit.module for unit in chunk.units], set().union(*mine))
        chunk.take_over()
        held.watch_forward(chunk)
    sharded(model, rest)
    held.watch_model()
    return held


def _packed(
    model: nn.Module,
    layers: Sequence[PlannedLayer],
    experts: Collection[nn.Parameter],
    options: ShardOptions,
    replicas: Communicator,
) -> list[GatheredChunk]:
    """Return modules in chunks; sharded experts have separate chunks."""
    packed = in_chunks(find_units(model, experts), chunk_bytes=options.chunk_bytes)
    packed += [
        [_unit_of(model, layer.experts.module)]
        for layer in layers
        if options.offload or replicas.num_ranks > _num_summed(layer)
    ]
    return [GatheredChunk(number=number, units=tuple(units)) for number, units in enumerate(packed)]


def _num_summed(layer: PlannedLayer) -> int:
    """Return the number of data-parallel ranks over which a layer has spread its experts."""
    return layer.communicator.num_ranks if layer.expert_parallel == "all_to_all" else 1


def _unit_of(model: nn.Module, module: nn.Module) -> Unit:
    """Return a layer's module of experts as a unit."""
    name = next(name for name, child in model.named_modules() if child is module)
    parameters = {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
    return Unit(name=name, module=module, parameters=parameters)


def _policy(parameters: Collection[nn.Parameter]) -> MixedPrecisionPolicy:
    """Give trainable two-byte parameters float32 masters, and return FSDP2's compute policy.

    Args:
        parameters: parameters of a single dtype.
    """
    dtypes = {parameter.dtype for parameter in parameters}
    if not any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    (dtype,) = dtypes
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _check_dtypes(named: Mapping[str, Collection[nn.Parameter]]) -> None:
    """Raise InputError if parameters that are gathered together have several dtypes."""
    for name, parameters in named.items():
        dtypes = {str(parameter.dtype) for parameter in parameters}
        if len(dtypes) > 1:
            raise InputError(
                f"{name} has parameters of several dtypes: {', '.join(sorted(dtypes))}",
                "give a module's parameters, and those that modules share, the same dtype",
            )


def _capacity(chunks: Sequence[GatheredChunk], options: ShardOptions) -> int:
    """Return the number of chunks that the cache may hold; raise InputError below two."""
    if options.cache_bytes is None or not chunks:
        return max(len(chunks), FEWEST_PLACES)
    largest = max(chunk.num_bytes for chunk in chunks)
    if options.cache_bytes < FEWEST_PLACES * largest:
        raise InputError(
            f"cache_bytes {options.cache_bytes} is less than two chunks, of which the largest has "
            f"{largest} bytes",
            f"use a cache_bytes of at least {FEWEST_PLACES * largest}, or parameters of the dtype "
            "that a plan is for",
        )
    return options.cache_bytes // largest


def _give_shards(
    optimizer: Optimizer, names: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Make an optimizer step the parameters of a sharded model.

    Experts are sharded over another mesh than other parameters. torch's fused Adam takes both in
    one call, and no kernel of SGD does.

    Args:
        names: parameter names in each of the optimizer's groups.
    """
    for group, listed in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [parameters[name] for name in listed]
        if isinstance(optimizer, SGD):
            group |= {"fused": False, "foreach": False}
        elif group.get("fused") is None and not group.get("foreach"):
            group["fused"] = not (group.get("capturable") or group.get("differentiable"))


def _check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise InputError unless an optimizer is fresh, of a known class, and of this model."""
    if not parameters:
        raise InputError("the model has no parameters")
    if type(optimizer) not in _KINDS:
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise InputError(
            f"{type(optimizer).__name__} cannot step shards of parameters", f"use one of {kinds}"
        )
    if optimizer.state:
        raise InputError(
            f"the optimizer has states of {len(optimizer.state)} parameters already",
            "shard the model before the first step",
        )
    known_ids = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known_ids:
                raise InputError(
                    f"parameter {place} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's {len(known_ids)}",
                    "build the optimizer on model.parameters()",
                )


def _num_states(optimizer: Optimizer) -> int:
    """Return the number of state tensors that the optimizer has for every parameter."""
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2 + any(group["amsgrad"] for group in optimizer.param_groups)
