"""The communicator of a group of torch.distributed, and new groups for one purpose."""

import datetime as dt
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moetune.comm.group import Communicator, OneRank
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import CollectiveError, InputError


def communicator_of(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of a group, `OneRank` for a group of one.

    Args:
        group: None is the world; without torch.distributed, one rank.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size(group) == 1:
        return OneRank()
    return GroupCommunicator(group)


def check_joined(what: str) -> None:
    """Check that this process is alone, or in torch.distributed's world.

    Args:
        what: would silently run on one rank alone; the subject of the error.

    Raises:
        InputError: a launcher started several ranks, and there is no process group yet.
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
    """Return the world's communicator for layers without a group of their own, made once.

    Where NCCL takes part it is a group of its own, with a stream of high priority: in the world's
    own group exchanges would queue behind other code's collectives, as gradients of a data-parallel
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
    members: Sequence[int] | None = None,
    *,
    purpose: str,
    backend: str | None = None,
    timeout_seconds: float | None = None,
) -> Communicator:
    """Make a group for one purpose, whose collectives no other code's come between.

    On GPUs it has a stream of high priority of its own. All members call this together. Without
    torch.distributed, or for one member, it is `OneRank`.

    Args:
        members: ranks in the world, in order; default, all.
        purpose: of the group, for torch's watchdog and flight recorder.
        backend: default, the world's.
        timeout_seconds: how long a rank waits for the others; default, torch's.

    Raises:
        CollectiveError: a member did not come.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    ranks = None if members is None else list(members)
    if len(ranks or range(dist.get_world_size())) == 1:
        return OneRank()
    timeout = None if timeout_seconds is None else dt.timedelta(seconds=timeout_seconds)
    options = None
    if "nccl" in (backend or dist.get_backend_config()):
        # A GPU starts its kernels before those of computation: they are short, and others wait
        # for them, on other ranks as well.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        timeout = options._timeout if timeout is None else timeout  # noqa: SLF001 - torch warns
        options._timeout = timeout  # noqa: SLF001 - where the two differ
    description = f"moetune: {purpose}"
    if ranks is None:
        group: dist.ProcessGroup = dist.new_group(
            timeout=timeout, backend=backend, group_desc=description, pg_options=options
        )
    else:
        group = group_of_members(
            ranks, description=description, backend=backend, timeout=timeout, options=options
        )
    return GroupCommunicator(group)


def group_of_members(
    ranks: Sequence[int],
    *,
    description: str,
    backend: str | None = None,
    timeout: dt.timedelta | None = None,
    options: Any = None,  # noqa: ANN401 - of the backend
) -> dist.ProcessGroup:
    """Make a group that no other rank takes part in. All its ranks call this together.

    torch names such a group by its ranks and by how many groups the calling rank is in. Members
    that are in different numbers of groups, as those of a first and a last stage may be, would each
    wait for a group of another name, for ever: they are evened out before.

    Args:
        ranks: in the world, this one among them.
        description, backend, timeout, options: as of `torch.distributed.new_group`.

    Raises:
        CollectiveError: a rank of the group did not come within the timeout.
    """
    with _unbound_world():
        _even_out(ranks, description, timeout)
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
            group_desc=description, pg_options=options,
        )  # fmt: skip
    return group


@contextmanager
def _unbound_world() -> Iterator[None]:
    """Make groups that are not cut out of the world's communicator, as torch does it otherwise.

    Under `init_process_group(device_id=…)` all ranks of the world would have to take part.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _even_out(ranks: Sequence[int], description: str, timeout: dt.timedelta | None) -> None:
    """Bring all members into as many groups: those in fewer make groups of themselves."""
    num_names = len(distributed_c10d._world.pg_names)  # noqa: SLF001 - what torch makes the name of
    most = max(_told_by_all(ranks, num_names, description, timeout))
    me = dist.get_rank()
    for _ in range(most - num_names):
        dist.new_group(
            [me], backend="gloo", use_local_synchronization=True,
            group_desc="moetune: evens out names of groups",
        )  # fmt: skip


def _told_by_all(
    ranks: Sequence[int], number: int, description: str, timeout: dt.timedelta | None
) -> list[int]:
    """Return the number of each member, given this one's."""
    store = distributed_c10d._get_default_store()  # noqa: SLF001 - no group has just these members
    me, prefix = dist.get_rank(), "moetune/groups/" + "_".join(map(str, ranks))
    turn = store.add(f"{prefix}/turn of {me}", 1)
    keys = [f"{prefix}/{turn}/{rank}" for rank in ranks]
    store.set(keys[list(ranks).index(me)], str(number))
    try:
        store.wait(keys, *([] if timeout is None else [timeout]))
    except RuntimeError as error:  # a file store has no class of its own
        raise CollectiveError(
            f"rank {me} waits for ranks {', '.join(map(str, ranks))} to make a group with it, and "
            f"not all came ({description}): {error}"
        ) from error
    return [int(store.get(key)) for key in keys]
