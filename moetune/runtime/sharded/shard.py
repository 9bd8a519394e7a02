"""`moetune.shard`: put a model and its optimizer's states into chunks (Elixir).

It packs parameters (`layout`), allocates each chunk (`stored`), hooks the model (`manager`, with
its `cache`), and returns an optimizer over the shards (`optimizer`).
"""

import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moetune.comm.launched import check_joined
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.layout import cache_capacity, find_units, replica_groups
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.model_chunks import ModelChunks, attach
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.runtime.sharded.options import CHUNK_BYTES, ShardOptions, agree, check_host_memory
from moetune.runtime.sharded.parameter_shards import check_optimizer, state_copies
from moetune.runtime.sharded.placement import ChunkStats, Placement, SideStream
from moetune.runtime.sharded.planned import planned_options
from moetune.runtime.sharded.repacking import ChunkBuilder, Repacking
from moetune.runtime.sharded.replicas import ReplicaGroup


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    chunk_bytes: int | None = None,
    cache_bytes: int | None = None,
    scatter: bool = True,
    offload: bool = False,
    pin: bool = True,
    step_in_backward: bool = False,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Put a model's states into chunks, in place, and return it with an optimizer for them.

    Modules find their parameters whole when they run; each rank holds 1 / ranks of all states.
    Gradients are means over the ranks of `group`, even those of a `MoELayer`'s experts, so that
    steps equal those on the whole batch. After the backward pass gradients are not in
    `parameter.grad`: clip with `moetune.clip_grad_norm_`, or the optimizer's.

    Args:
        optimizer: a fresh Adam, AdamW or SGD over parameters of the model.
        chunk_bytes: of a chunk, at least the largest parameter's; default 32 MiB.
        cache_bytes: of the whole chunks on the device, at least two; default all chunks.
        scatter: False leaves every chunk whole on every rank, as DistributedDataParallel does.
        offload: shards, gradients and optimizer states are in host memory.
        pin: that memory is page-locked, if the device is a GPU.
        step_in_backward: chunks are stepped as soon as their gradients are complete, overlapped
            with the rest of the backward pass. For steps of one backward pass without clipping.
        group: data-parallel group, default the world. It contains the expert-parallel groups, and
            no two ranks of a tensor-parallel group.
        device: of the computation; default, that of the parameters.
        plan: a plan with chunks, or the path of its file: gives chunk_bytes, cache_bytes, scatter
            and offload. Every rank gives the same one.

    Raises:
        InputError: a chunk is smaller than a parameter, the cache smaller than two chunks, the
            optimizer of another kind or model, the model sharded already, or the plan without
            chunks, for another model or another number of ranks.
        RankMismatchError: the ranks have different models, options or plans, or another rank has
            an InputError; on all ranks.
        AllocationError: the host lacks memory for the offloaded states.
    """
    replicas = _replicas(group)

    def options_of() -> ShardOptions:
        own = ShardOptions(
            chunk_bytes=CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
            cache_bytes=cache_bytes, scatter=scatter, offload=offload, pin=pin,
        )  # fmt: skip
        return own if plan is None else planned_options(plan, model, replicas, own=own)

    builder = _builder(model, optimizer, replicas, options_of, device)
    packed, options = builder.pack(), builder.options
    capacity = cache_capacity(packed, options)
    if options.offload:
        copies = 2 + state_copies(optimizer)
        pins = options.pin and builder.placement.device.type != "cpu"
        problem = check_host_memory(packed, replicas, copies=copies, pins=pins)
        agree(replicas, model, options, problem)
    chunks = tuple(builder.store(number, chunk) for number, chunk in enumerate(packed))
    _move_buffers(model, builder.placement.device)
    cache = Cache(chunks, capacity)
    manager = ChunkManager(model, find_units(model), chunks, builder.parameters, cache)
    stepper = ChunkedOptimizer(
        optimizer,
        manager,
        replicas,
        builder.placement.reduce_stream,
        repack=Repacking(builder, replicas).run,
        in_backward=step_in_backward,
    )
    clip = stepper.clip_grad_norm_
    attach(model, ModelChunks(model, manager, builder.stats, replicas, clip))
    return model, stepper


def _builder(
    model: nn.Module,
    optimizer: Optimizer,
    replicas: ReplicaGroup,
    options_of: Callable[[], ShardOptions],
    device: torch.device | str | None,
) -> ChunkBuilder:
    """Return the builder of the model's chunks, once all ranks agree on model and options."""
    parameters = dict(model.named_parameters())
    options: ShardOptions | None = None
    problem: MoetuneError | None = None
    try:
        options = options_of()
        _check_plain(parameters)
        check_optimizer(optimizer, parameters)
    except InputError as error:
        problem = error
    agree(replicas, model, options, problem)
    assert options is not None  # noqa: S101 - without them there was a problem
    replicas_of, labels = replica_groups(model, replicas)
    target = next(iter(parameters.values())).device if device is None else torch.device(device)
    return ChunkBuilder(
        parameters=parameters,
        replicas_of=replicas_of,
        labels=labels,
        options=options,
        placement=_placement(target, options, replicas),
        stats=ChunkStats(),
    )


def _check_plain(parameters: Mapping[str, nn.Parameter]) -> None:
    name = next((name for name, each in parameters.items() if is_dtensor(each)), None)
    if name is not None:
        raise InputError(
            f"{name} is sharded already: it is a DTensor",
            "use either moetune.shard or fully_shard and moetune.prepare_fsdp",
        )


def _replicas(group: dist.ProcessGroup | None) -> ReplicaGroup:
    check_joined("the sharded model")
    if not (dist.is_available() and dist.is_initialized()):
        return ReplicaGroup()
    return ReplicaGroup(dist.get_process_group_ranks(group))


def _placement(device: torch.device, options: ShardOptions, replicas: ReplicaGroup) -> Placement:
    return Placement(
        device=device,
        scatter=options.scatter,
        offload=options.offload,
        pin=options.pin,
        scale=1 / replicas.num_ranks,
        gather_stream=SideStream(device),
        reduce_stream=SideStream(device),
    )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as `Module.to` does
            if buffer is not None:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
