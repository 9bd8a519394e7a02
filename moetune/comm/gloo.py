"""The communicator of a group of torch.distributed, and new groups for one purpose."""

import datetime as dt
import functools
import os
from typing import Any

import torch.distributed as dist

from moetune.comm.group import Communicator, OneRank
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError


def communicator_of(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of a group, `OneRank` for a single rank.

    Args:
        group: None is the world; without torch.distributed, one rank.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size(group) == 1:
        return OneRank()
    return GroupCommunicator(group)


def check_joined(what: str) -> None:
    """Raise InputError where a launcher started several ranks, and there is no process group yet.

    Args:
        what: would silently run on each rank alone; the subject of the error.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - the launcher's, as torch reads it
    if num_ranks == "1" or (dist.is_available() and dist.is_initialized()):
        return
    raise InputError(
        f"{what} would run alone in each of {num_ranks} processes (WORLD_SIZE): there is no "
        "process group yet",
        "call torch.distributed.init_process_group() before",
    )


def shared_communicator() -> Communicator:
    """Return the world's communicator for layers without another group, made once.

    Where NCCL takes part it is another group, with a stream of high priority: in the group of the
    world exchanges would queue behind other code's collectives, as gradients of a data-parallel
    wrapper. All ranks of the world call this together the first time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size() == 1 or "nccl" not in dist.get_backend_config():
        return communicator_of(None)
    return _shared_of(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _shared_of(_: dist.ProcessGroup) -> Communicator:
    """Make the group of one world; of the next world it is made anew."""
    return new_communicator(purpose="experts of the world")


def new_communicator(
    *, purpose: str, backend: str | None = None, timeout_seconds: float | None = None
) -> Communicator:
    """Make a group of all ranks for one purpose, whose collectives no other code's come between.

    On GPUs it has a stream of high priority. All ranks call this together. Without
    torch.distributed, or for one rank, it is `OneRank`.

    Args:
        purpose: of the group, for torch's watchdog and flight recorder.
        backend: default, the world's.
        timeout_seconds: how long a rank waits for the others; default, torch's.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return OneRank()
    timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
    options = None
    if "nccl" in (backend or dist.get_backend_config()):
        # A GPU starts its kernels before those of computation: they are short, and others wait
        # for them, on other ranks as well.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        timeout = options._timeout if timeout is None else timeout  # noqa: SLF001 - torch warns
        options._timeout = timeout  # noqa: SLF001 - where the two differ
    group = dist.new_group(
        timeout=timeout, backend=backend, group_desc=f"moetune: {purpose}", pg_options=options
    )
    return GroupCommunicator(group)


def group_of_this_rank(purpose: str) -> dist.ProcessGroup:
    """Make a group of this rank alone, whatever the others do.

    It is not cut out of the world's communicator, as torch does it otherwise: all ranks of a world
    under `init_process_group(device_id=…)` would have to take part.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group: dist.ProcessGroup = dist.new_group(
            [dist.get_rank()], use_local_synchronization=True, group_desc=f"moetune: {purpose}"
        )
    finally:
        world.bound_device_id = device
    return group
