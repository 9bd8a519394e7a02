"""Options of `moetune.shard`, and the checks that all ranks make before they allocate."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from moetune.comm.agree import raise_on_all
from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk
from moetune.domain.errors import AllocationError, InputError, MoetuneError, RankMismatchError
from moetune.domain.units import format_bytes, pinned_bytes

CHUNK_BYTES = 32 * 2**20
_ALLOCATED_COPIES = 2
"""Master and gradient, which a chunk allocates; the optimizer's states are torch's."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """Options that the caller of `moetune.shard` chose.

    Args:
        cache_bytes: None caches all chunks.
        plan: id of the plan that they are from; "" for none.
    """

    chunk_bytes: int = CHUNK_BYTES
    cache_bytes: int | None = None
    scatter: bool = True
    offload: bool = False
    pin: bool = True
    plan: str = ""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise InputError(f"chunk_bytes must be at least 1, got {self.chunk_bytes}")
        if self.cache_bytes is not None and self.cache_bytes < 2 * self.chunk_bytes:
            raise InputError(
                f"cache_bytes {self.cache_bytes} is less than two chunks of {self.chunk_bytes}",
                f"use a cache_bytes of at least {2 * self.chunk_bytes}",
            )
        if self.offload and not self.scatter:
            raise InputError(
                "offload=True with scatter=False would keep every chunk in every rank's host "
                "memory",
                "use scatter=True",
            )


def agree(
    replicas: Communicator,
    model: nn.Module,
    options: ShardOptions | None,
    problem: MoetuneError | None,
) -> None:
    """Check that all ranks shard the same model with the same options; raise on all of them.

    Args:
        options: None where the problem is with them.
        problem: an error of this rank's, which the others must not wait for.

    Raises:
        RankMismatchError: they differ in a parameter or an option, or some ranks have a problem.
        MoetuneError: all ranks have one.
    """
    raise_on_all(replicas, problem, "moetune.shard")
    lines = [str(options)] + [
        f"{name}: {tuple(parameter.shape)} {parameter.dtype} trainable {parameter.requires_grad}"
        for name, parameter in model.named_parameters()
    ]
    rows = replicas.all_gather_object(lines, "the comparison of models")
    for each in zip_longest(*rows, fillvalue="nothing"):
        if len(set(each)) > 1:
            listed = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(each))
            raise RankMismatchError(f"the ranks shard different models\n{listed}")


def check_host_memory(
    chunks: Sequence[Chunk], replicas: Communicator, *, copies: int, pins: bool
) -> MoetuneError | None:
    """Return an error if the host lacks memory for the shards of all its ranks.

    Args:
        copies: number of tensors in at least float32 for trainable values: master, gradient and
            the optimizer's states.
        pins: all but the optimizer's states are in page-locked memory.
    """
    host = socket.gethostname()
    num_ranks = replicas.all_gather_object(host, "the names of hosts").count(host)
    needed = num_ranks * sum(_host_bytes(chunk, copies, pins) for chunk in chunks)
    available = available_bytes()
    if needed <= available:
        return None
    return AllocationError(
        f"the shards of {num_ranks} ranks need {needed} bytes of host memory "
        f"({format_bytes(needed)}), and {available} ({format_bytes(available)}) are available",
        "use more hosts, a smaller model, or offload=False",
    )


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the host memory that is available without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise InputError(f"MemAvailable is not in {meminfo}")


def _host_bytes(chunk: Chunk, copies: int, pins: bool) -> int:
    if chunk.is_fused:
        return 0
    elements = chunk.num_elements // chunk.group.ranks
    size: int = getattr(torch, chunk.group.dtype).itemsize
    full = max(size, torch.float32.itemsize)
    allocated, states = [size], 0
    if chunk.group.is_trainable:
        allocated = [full, full] if size == full else [size, full, full]
        states = elements * full * (copies - _ALLOCATED_COPIES)
    sizes = [elements * each for each in allocated]
    return states + sum(map(pinned_bytes, sizes) if pins else sizes)
