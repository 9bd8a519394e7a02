"""Options of `moetune.shard`, and the checks that all ranks make before they allocate."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moetune.comm.agree import raise_on_all
from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk
from moetune.domain.errors import AllocationError, InputError
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


def check_host_memory(
    chunks: Sequence[Chunk], replicas: Communicator, *, copies: int, pins: bool
) -> None:
    """Check that the host has memory for the shards of all its ranks; all ranks call this.

    Args:
        copies: number of tensors in at least float32 for trainable values: master, gradient and
            the optimizer's states.
        pins: all but the optimizer's states are in page-locked memory.

    Raises:
        AllocationError: hosts of all ranks lack it.
        RankMismatchError: some lack it; on all ranks.
    """
    host = socket.gethostname()
    num_ranks = replicas.all_gather_object(host, "the names of hosts").count(host)
    needed = num_ranks * sum(_host_bytes(chunk, copies, pins) for chunk in chunks)
    available = available_bytes()
    problem = AllocationError(
        f"the shards of {num_ranks} ranks need {needed} bytes of host memory "
        f"({format_bytes(needed)}), and {available} ({format_bytes(available)}) are available",
        "use more hosts, a smaller model, or offload=False",
    )
    raise_on_all(replicas, problem if needed > available else None, "moetune.shard")


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
