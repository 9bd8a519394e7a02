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
        group: None is the world, or a single rank without torch.distributed.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size(group) == 1:
        return OneRank()
    return GroupCommunicator(group)


def check_joined(what: str) -> None:
    """Raise InputError if a launcher started several ranks but no process group exists yet.

    Args:
        what: names what would silently run on each rank alone; it is the subject of the error.
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
    """Return the communicator of the world, made once, for layers that were given no group.

    With NCCL it is a separate group with a high-priority stream. In the world's group, exchanges
    would queue behind other collectives, such as a data-parallel wrapper's gradients. All ranks of
    the world call this together the first time.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size() == 1 or "nccl" not in dist.get_backend_config():
        return communicator_of(None)
    return _shared_of(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _shared_of(_: dist.ProcessGroup) -> Communicator:
    """Make the group of this world; a later world gets a new group."""
    return new_communicator(purpose="experts of the world")


def new_communicator(
    *, purpose: str, backend: str | None = None, timeout_seconds: float | None = None
) -> Communicator:
    """Make a group of all ranks for one purpose, which no other code's collectives delay.

    On GPUs the group has a high-priority stream. All ranks call this together. Without
    torch.distributed, or for one rank, this returns `OneRank`.

    Args:
        purpose: names the group for torch's watchdog and flight recorder.
        backend: the group's backend; the default is the world's.
        timeout_seconds: how long a rank waits for the others; the default is torch's.
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
    """Make a group of this rank alone; the other ranks need not call this.

    By default torch splits a group off the world's communicator. Under
    `init_process_group(device_id=…)` all ranks of the world would have to take part in that.
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
