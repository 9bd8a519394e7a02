"""`moetune.shard`: put a model and its optimizer's states into chunks (Elixir).

It packs parameters, allocates each chunk (`stored`), hooks the model (`model_chunks`, with its
`cache`), and returns an optimizer over the shards (`optimizer`).
"""

import functools
import os
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moetune.comm.agree import agree
from moetune.comm.gloo import check_joined, new_communicator
from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk, ChunkGroup, PackedParameter, pack
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.replicas import check_placements, expert_groups, expert_layers
from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.hooks import find_units
from moetune.runtime.sharded.model_chunks import ModelChunks
from moetune.runtime.sharded.optimizer import ChunkedOptimizer, check_optimizer, state_copies
from moetune.runtime.sharded.options import (
    CHUNK_BYTES,
    ShardOptions,
    check_host_memory,
    planned_options,
)
from moetune.runtime.sharded.stored import ChunkStats, Placement, StoredChunk

_PURPOSE = "a model's chunks"
"""Of groups that are not the model's, whose exchanges would come between theirs."""


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    chunk_bytes: int | None = None,
    cache_bytes: int | None = None,
    offload: bool = False,
    pin: bool = True,
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
        offload: shards, gradients and optimizer states are in host memory.
        pin: that memory is page-locked, if the device is a GPU.
        group: data-parallel group, default the world. It contains the expert-parallel groups, and
            no two ranks of a tensor-parallel group.
        device: of the computation; default, that of the parameters.
        plan: a plan with chunks, or the path of its file: gives chunk_bytes, cache_bytes and
            offload. Every rank gives the same one.

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
    ranks = None if is_alone else dist.get_process_group_ranks(group)
    replicas = new_communicator(ranks, purpose=_PURPOSE)
    parameters = dict(model.named_parameters())

    def usable_options() -> ShardOptions:
        given = ShardOptions(
            chunk_bytes=CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
            cache_bytes=cache_bytes, offload=offload, pin=pin,
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
    replicas_of, labels = _replica_groups(model, replicas)
    packed = _pack_model(parameters, replicas_of, labels, options)
    capacity = _cache_capacity(packed, options)
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
    cache, units = Cache(chunks, capacity), find_units(model)
    held = ModelChunks(model, units, chunks, parameters, cache, stats, replicas)
    stepper = ChunkedOptimizer(optimizer, held, placement.reduce_stream)
    held.clip_grad_norm_ = stepper.clip_grad_norm_
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


def _replica_groups(
    model: nn.Module, replicas: Communicator
) -> tuple[dict[str, Communicator], dict[str, str]]:
    """Return the ranks with replicas of each parameter, and labels that tell experts' groups apart.

    Raises:
        RankMismatchError: the ranks have different layers.
        InputError: a layer's expert-parallel ranks are not all in the group, or a plan has placed
            its experts; on all ranks.
    """
    check_placements(model, replicas)
    replicas_of = dict.fromkeys((name for name, _ in model.named_parameters()), replicas)
    labels: dict[str, str] = {}
    made = {replicas.members: replicas}
    groups_of = functools.cache(partial(expert_groups, data_parallel=replicas))
    for name, layer in expert_layers(model).items():
        layer.experts.placement.check_natural("moetune.shard")
        groups = groups_of(layer)
        members = tuple(group[layer.communicator.rank] for group in groups)
        if members not in made:
            made[members] = new_communicator(members, purpose=_PURPOSE)
        replicas_of[name], labels[name] = made[members], f"experts {groups}"
    return replicas_of, labels


def _pack_model(
    parameters: Mapping[str, nn.Parameter],
    replicas_of: Mapping[str, Communicator],
    labels: Mapping[str, str],
    options: ShardOptions,
) -> tuple[Chunk, ...]:
    """Return the chunks of a model's parameters, packed in their order.

    Raises:
        InputError: a parameter is larger than a chunk, or chunks cannot have its dtype.
    """
    return pack(
        (
            PackedParameter(
                name=name,
                num_elements=parameter.numel(),
                group=ChunkGroup(
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    ranks=replicas_of[name].num_ranks,
                    label=labels.get(name, ""),
                    is_trainable=parameter.requires_grad,
                ),
            )
            for name, parameter in parameters.items()
        ),
        chunk_bytes=options.chunk_bytes,
    )


def _cache_capacity(chunks: Sequence[Chunk], options: ShardOptions) -> int:
    """Return the number of whole chunks that the cache may hold.

    Raises:
        InputError: the number is below two.
    """
    cached = [chunk.num_bytes for chunk in chunks if not chunk.is_fused]
    if options.cache_bytes is None or not cached:
        return max(len(cached), 2)
    if options.cache_bytes < 2 * max(cached):
        raise InputError(
            f"cache_bytes {options.cache_bytes} is less than two chunks, which have "
            f"{max(cached)} bytes each, rounded up for their ranks",
            f"use a cache_bytes of at least {2 * max(cached)}",
        )
    return options.cache_bytes // max(cached)
