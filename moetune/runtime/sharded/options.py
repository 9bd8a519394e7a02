"""Options of `moetune.shard`, from its caller or a plan, and checks before it allocates memory."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moetune.comm.agree import raise_on_all
from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunks
from moetune.domain.errors import AllocationError, InputError
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes, pinned_bytes
from moetune.runtime.plans.book import read_plan
from moetune.runtime.replicas import named_layers, owners_of

CHUNK_BYTES = 32 * 2**20
_MEMINFO = Path("/proc/meminfo")
_MAX_RATIO = 1.5
"""The ratio of parameters from which models differ: a head may share the embedding's parameters."""
_ELSE = "plan this model with `moetune plan --output`, or give chunk_bytes instead of a plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The options that the caller of `moetune.shard` chose.

    Args:
        cache_bytes: None caches all chunks.
        plan: id of the plan that the options are from; "" without a plan.
    """

    chunk_bytes: int = CHUNK_BYTES
    cache_bytes: int | None = None
    offload: bool = False
    plan: str = ""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise InputError(f"chunk_bytes must be at least 1, got {self.chunk_bytes}")


def check_host_memory(
    model: nn.Module, replicas: Communicator, *, num_states: int, pins: bool
) -> None:
    """Check that the host has memory for the shards of all its ranks; all ranks call this.

    Args:
        num_states: state tensors that the optimizer has for each parameter.
        pins: parameters are in pinned memory.

    Raises:
        AllocationError: the hosts of all ranks lack memory.
        RankMismatchError: some hosts lack memory; raised on all ranks.
    """
    host = socket.gethostname()
    num_here = replicas.all_gather_object(host, "the names of hosts").count(host)
    needed = num_here * sum(
        _host_bytes(parameter, replicas.num_ranks, num_states, pins=pins)
        for parameter in model.parameters()
    )
    available = available_bytes()
    problem = AllocationError(
        f"the shards of {num_here} ranks need {needed} bytes of host memory "
        f"({format_bytes(needed)}), and {available} ({format_bytes(available)}) are available",
        "use more hosts, a smaller model, or offload=False",
    )
    raise_on_all(replicas, problem if needed > available else None, "moetune.shard")


def available_bytes() -> int:
    """Return the host memory that is available without swapping."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InputError(f"MemAvailable is not in {_MEMINFO}")


def _host_bytes(parameter: nn.Parameter, num_ranks: int, num_states: int, *, pins: bool) -> int:
    """Return the bytes of a rank's shard; trainable parameters count gradient and states, too."""
    size = parameter.element_size()
    if parameter.requires_grad:
        size = max(size, torch.float32.itemsize)
    shard = -(-parameter.numel() // num_ranks) * size
    return (pinned_bytes(shard) if pins else shard) + parameter.requires_grad * (
        (1 + num_states) * shard
    )


def planned_options(
    plan: object, model: nn.Module, num_ranks: int, *, given: ShardOptions
) -> ShardOptions:
    """Return a plan's chunks as options.

    Args:
        plan: a training's plan, as `moetune.plan` returns it, or the path of a plan file.
        num_ranks: ranks of the data-parallel group.
        given: the caller's other options, which must be the defaults.

    Raises:
        InputError: there is no plan, the plan has no chunks or is for another model or number of
            ranks, or the caller gave other options, too.
    """
    chosen = _plan_of(plan)
    name = f"plan {chosen.id[:6]}"
    if given != ShardOptions():
        raise InputError(
            f"{name} and other options of chunks are given",
            "omit chunk_bytes, cache_bytes and offload, or the plan",
        )
    if chosen.chunks is None:
        raise InputError(
            f"{name} has no chunks: its states are not sharded over single ranks",
            "plan with --target moetune --zero 3 --tp 1 --cp 1 --pp 1, or give chunk_bytes",
        )
    if not chosen.chunks.scatter:
        raise InputError(
            f"{name} keeps every chunk whole on every rank",
            "use DistributedDataParallel with moetune.prepare_ddp, or plan again",
        )
    _check_ranks(chosen, model, num_ranks, name)
    _check_size(chosen.chunks, model, name)
    return ShardOptions(
        chunk_bytes=chosen.chunks.chunk_bytes, cache_bytes=chosen.chunks.cache_bytes,
        offload=chosen.chunks.offload, plan=chosen.id,
    )  # fmt: skip


def _plan_of(plan: object) -> TrainingDocument:
    """Return a training's plan, given as a view, as the plan, or as the path of its file."""
    given = getattr(plan, "plan", plan)
    if isinstance(given, str | os.PathLike):
        given = read_plan(Path(given))
    if not hasattr(given, "as_model"):
        raise InputError(
            f"{plan!r} is neither the plan of a training nor a path",
            "make a plan with moetune.plan, or give the path of a plan file",
        )
    model: TrainingDocument = given.as_model()
    return model


def _check_ranks(plan: TrainingDocument, model: nn.Module, num_ranks: int, name: str) -> None:
    """Raise InputError unless states and experts are spread over the plan's numbers of ranks."""
    layout = plan.layout
    if layout.dp != num_ranks:
        raise InputError(
            f"{name} shards over {layout.dp} ranks, the data-parallel group has {num_ranks}", _ELSE
        )
    for _, layer in named_layers(model):
        num_spread = layer.communicator.num_ranks
        if num_spread != layout.ep:
            raise InputError(
                f"{name} is for experts on {layout.ep} ranks, this model has them on {num_spread}",
                _ELSE,
            )


def _check_size(chunks: Chunks, model: nn.Module, name: str) -> None:
    """Raise InputError if the model has far more or fewer parameters than the plan's model."""
    owners, size = owners_of(named_layers(model)), 0
    for parameter in model.parameters():
        layer = owners.get(id(parameter))
        size += parameter.numel() * (1 if layer is None else layer.communicator.num_ranks)
    if not 1 / _MAX_RATIO < size / chunks.num_parameters < _MAX_RATIO:
        raise InputError(
            f"{name} is for {chunks.num_parameters:,} parameters, this model has {size:,}",
            _ELSE,
        )
