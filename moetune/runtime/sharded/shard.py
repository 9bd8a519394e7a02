"""`moetune.shard`: a model and its optimizer in chunks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.layout import (
    Placement,
    ShardOptions,
    agree,
    check_host_memory,
    find_units,
    num_places,
    teams_of,
)
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.runtime.sharded.pieces import check_optimizer, state_copies
from moetune.runtime.sharded.repacking import Packer, Repacking
from moetune.runtime.sharded.state import ModelChunks, attach
from moetune.runtime.sharded.streams import Ledger, SideStream
from moetune.runtime.sharded.team import Team

_CHUNK_BYTES = 32 * 2**20


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
    plan: Plan | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Put a model's states into chunks, in place, and return it with an optimizer for them.

    Modules find their parameters whole when they run; each rank keeps 1 / ranks of all states.
    Gradients are means over the ranks of `group`, those of a `MoELayer`'s experts too, so that
    steps equal those on the whole batch. A gradient is not in `parameter.grad` after the
    backward pass; use the optimizer's `clip_grad_norm_`.

    Args:
        optimizer: a fresh Adam, AdamW or SGD over parameters of the model.
        chunk_bytes: of a chunk, at least the largest parameter's; default 32 MiB.
        cache_bytes: of the whole chunks on the device, at least two; default all chunks.
        scatter: False keeps every chunk whole on every rank, as DistributedDataParallel does.
        offload: shards, gradients and optimizer states are in host memory.
        pin: that memory is page-locked where the device is a GPU.
        step_in_backward: chunks are stepped as soon as their gradients are there, beside the rest
            of the backward pass. For steps of one backward pass without clipping.
        group: data-parallel group, default the world; it contains the expert-parallel groups,
            and not a tensor-parallel layer's other ranks.
        device: that computes; default, that of the parameters.
        plan: gives chunk_bytes, cache_bytes, scatter and offload.

    Raises:
        InputError: a chunk is smaller than a parameter, the cache smaller than two chunks, or
            the optimizer of another kind or model.
        RankMismatchError: the ranks have different models or options; the same on all.
        AllocationError: the host has no memory for what is offloaded.
    """
    options = _options(chunk_bytes, cache_bytes, scatter, offload, pin, plan)
    team = _team_of(group)
    packer = _packer(model, optimizer, team, options, device)
    packed = packer.pack()
    cache_places = num_places(packed, options)
    if options.offload:
        copies = 2 + state_copies(optimizer)
        agree(team, model, options, check_host_memory(packed, team, copies=copies))
    chunks = tuple(packer.store(number, chunk) for number, chunk in enumerate(packed))
    _move_buffers(model, packer.placement.device)
    cache = Cache(chunks, cache_places)
    keeper = ChunkManager(model, find_units(model), chunks, packer.parameters, cache)
    stepper = ChunkedOptimizer(
        optimizer,
        keeper,
        team,
        packer.placement.leaving,
        repack=Repacking(packer, team).run,
        in_backward=step_in_backward,
    )
    attach(model, ModelChunks(model, keeper, packer.ledger, team))
    return model, stepper


def _packer(
    model: nn.Module,
    optimizer: Optimizer,
    team: Team,
    options: ShardOptions,
    device: torch.device | str | None,
) -> Packer:
    """Return what packs the model, once all ranks want the same."""
    parameters = dict(model.named_parameters())
    problem: MoetuneError | None = None
    try:
        check_optimizer(optimizer, parameters)
    except InputError as error:
        problem = error
    agree(team, model, options, problem)
    teams, labels = teams_of(model, team)
    target = next(iter(parameters.values())).device if device is None else torch.device(device)
    return Packer(
        parameters=parameters,
        teams=teams,
        labels=labels,
        options=options,
        placement=_placement(target, options, team),
        ledger=Ledger(),
    )


def _options(
    chunk_bytes: int | None,
    cache_bytes: int | None,
    scatter: bool,
    offload: bool,
    pin: bool,
    plan: Plan | None,
) -> ShardOptions:
    if plan is not None:
        return _planned(plan, pin)
    return ShardOptions(
        chunk_bytes=_CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
        cache_bytes=cache_bytes,
        scatter=scatter,
        offload=offload,
        pin=pin,
    )


def _planned(plan: Plan, pin: bool) -> ShardOptions:
    chosen = plan.chunks
    if chosen is None:
        raise InputError(f"plan {plan.id} has no chunks", "give chunk_bytes instead")
    return ShardOptions(
        chunk_bytes=chosen.chunk_bytes,
        cache_bytes=chosen.cache_bytes,
        scatter=chosen.scatter,
        offload=chosen.offload,
        pin=pin,
    )


def _team_of(group: dist.ProcessGroup | None) -> Team:
    if not (dist.is_available() and dist.is_initialized()):
        return Team()
    return Team(dist.get_process_group_ranks(group))


def _placement(device: torch.device, options: ShardOptions, team: Team) -> Placement:
    return Placement(
        device=device,
        scatter=options.scatter,
        offload=options.offload,
        pin=options.pin,
        scale=1 / team.num_ranks,
        coming=SideStream(device),
        leaving=SideStream(device),
    )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 - as `Module.to` does
            if buffer is not None:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
