"""`moetune.shard`: put a model and its optimizer's states into chunks (Elixir).

It packs parameters (`layout`), allocates each chunk (`stored`), hooks the model (`manager`, with
its `cache`), and returns an optimizer over the shards (`optimizer`).
"""

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moetune.comm.agree import agree
from moetune.comm.gloo import check_joined
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.layout import cache_capacity, find_units, pack_model, replica_groups
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.model_chunks import ModelChunks, attach
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.runtime.sharded.options import CHUNK_BYTES, ShardOptions, check_host_memory
from moetune.runtime.sharded.parameter_shards import check_optimizer, state_copies
from moetune.runtime.sharded.placement import ChunkStats, Placement
from moetune.runtime.sharded.planned import planned_options
from moetune.runtime.sharded.replicas import replica_group
from moetune.runtime.sharded.stored import StoredChunk


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
        RankMismatchError: the ranks have different models, options or plans, or some ranks have
            an InputError; on all ranks.
        AllocationError: the host lacks memory for the offloaded states.
    """
    check_joined("the sharded model")
    is_alone = not (dist.is_available() and dist.is_initialized())
    replicas = replica_group(() if is_alone else dist.get_process_group_ranks(group))
    parameters = dict(model.named_parameters())

    def usable_options() -> ShardOptions:
        given = ShardOptions(
            chunk_bytes=CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
            cache_bytes=cache_bytes, scatter=scatter, offload=offload, pin=pin,
        )  # fmt: skip
        _check_plain(parameters)
        check_optimizer(optimizer, parameters)
        if plan is None:
            return given
        return planned_options(plan, model, replicas.num_ranks, given=given)

    options = agree(
        replicas,
        usable_options,
        lambda options: [str(options), *map(_described, parameters.items())],
        "moetune.shard",
    )
    replicas_of, labels = replica_groups(model, replicas)
    packed = pack_model(parameters, replicas_of, labels, options)
    capacity = cache_capacity(packed, options)
    target = next(iter(parameters.values())).device if device is None else torch.device(device)
    if options.offload:
        copies, pins = 2 + state_copies(optimizer), options.pin and target.type != "cpu"
        check_host_memory(packed, replicas, copies=copies, pins=pins)
    placement, stats = Placement.of(target, options, replicas.num_ranks), ChunkStats()
    chunks = tuple(
        StoredChunk(number, chunk, parameters, replicas_of[chunk.slots[0].name], placement, stats)
        for number, chunk in enumerate(packed)
    )
    _move_buffers(model, target)
    manager = ChunkManager(model, find_units(model), chunks, parameters, Cache(chunks, capacity))
    stepper = ChunkedOptimizer(
        optimizer, manager, replicas, placement.reduce_stream, in_backward=step_in_backward
    )
    attach(model, ModelChunks(model, manager, stats, replicas, stepper.clip_grad_norm_))
    return model, stepper


def _described(named: tuple[str, nn.Parameter]) -> str:
    name, each = named
    return f"{name}: {tuple(each.shape)} {each.dtype} trainable {each.requires_grad}"


def _check_plain(parameters: Mapping[str, nn.Parameter]) -> None:
    name = next((name for name, each in parameters.items() if is_dtensor(each)), None)
    if name is not None:
        raise InputError(
            f"{name} is sharded already: it is a DTensor",
            "use either moetune.shard or fully_shard and moetune.prepare_fsdp",
        )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as `Module.to` does
            if buffer is not None:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
