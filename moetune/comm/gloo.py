"""The communicator of a group: torch's collectives, but a lone all-to-all of CPU tensors by hand.

gloo's own all-to-all sends before it posts its receives. A late rank then queues its "ready" behind
its own data, and the two directions of the wire run one after the other: a lone exchange takes
between one and two times the wire's time, by chance. With receives posted first it always takes
about one. In a queue of several chunks this makes no difference, and gloo's own all-to-all, which
gloo's threads issue, disturbs the computing thread less (steps of 4 to 16 chunks were 4 to 15 %
faster).

gloo's own reduce-scatter sends as much as its all-reduce, twice as much as needed on two ranks. Of
CPU tensors it is an all-to-all and a sum instead, always in the order of the ranks.
"""

import datetime as dt
import functools
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from moetune.comm.group import Communicator, OneRank
from moetune.comm.member_groups import group_of_members
from moetune.comm.process_group import GroupCommunicator
from moetune.comm.transfer import SummedTransfer, Transfer
from moetune.domain.errors import InputError

_NUM_TAGS = 2**20


class ReceivesFirst(GroupCommunicator):
    """A group in which a lone all-to-all of CPU tensors posts its receives first.

    The tensors decide, at each exchange: a layer that was made on a CPU may move to a GPU. On
    NCCL such receives would wait for each other's sends for ever, as each rank runs its own
    operations with another rank in the order of issue.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._issued = 0

    def all_to_all(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        name: str,
        *,
        is_alone: bool = False,
    ) -> Transfer:
        """Post all receives, then all sends, of CPU tensors with no other exchange behind them."""
        if not is_alone or rows.device.type != "cpu":
            return super().all_to_all(output, rows, output_splits, input_splits, name)
        arriving, leaving = self._parts(output, output_splits), self._parts(rows, input_splits)
        transfer = self._start(
            "all_to_all", name, (output, rows), lambda: self._receives_first(arriving, leaving)
        )
        arriving[self.rank].copy_(leaving[self.rank])
        return transfer

    def reduce_scatter(
        self, total: torch.Tensor, shards: torch.Tensor | Sequence[torch.Tensor], name: str
    ) -> Transfer:
        """Exchange the shards of CPU tensors, and add them up in `wait`."""
        if total.device.type != "cpu":
            return super().reduce_scatter(total, shards, name)
        parts = total.new_empty((self.num_ranks, *total.shape))
        if isinstance(shards, torch.Tensor):
            transfer = self.all_to_all(parts.view(-1), shards.view(-1), None, None, name)
        else:
            leaving = list(shards)
            transfer = self._start(
                "reduce_scatter", name, (total, *leaving),
                lambda: self._receives_first(parts, leaving),
            )  # fmt: skip
            parts[self.rank].copy_(leaving[self.rank])
        return SummedTransfer(transfer, parts, total)

    def _receives_first(
        self, arriving: Sequence[torch.Tensor] | torch.Tensor, leaving: Sequence[torch.Tensor]
    ) -> Iterator[dist.Work]:
        # Empty parts do not travel. Without a tag of its own, the next exchange's part would
        # take the place of the one that was left out.
        tag = self._issued % _NUM_TAGS
        self._issued += 1
        others = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        # In the order in which they will arrive: the rank before this one sends here first.
        for peer in reversed(others):
            if len(arriving[peer]):
                yield _issued(dist.irecv(arriving[peer], group=self.group, group_src=peer, tag=tag))
        for peer in others:
            if len(leaving[peer]):
                yield _issued(dist.isend(leaving[peer], group=self.group, group_dst=peer, tag=tag))

    def _parts(self, rows: torch.Tensor, splits: Sequence[int] | None) -> list[torch.Tensor]:
        equal = [len(rows) // self.num_ranks] * self.num_ranks
        return list(rows.split(equal if splits is None else list(splits)))


def communicator_of(group: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of a group, `OneRank` for a group of one.

    Args:
        group: None is the world; without torch.distributed, one rank.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    if dist.get_world_size(group) == 1:
        return OneRank()
    return ReceivesFirst(group)


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
    return ReceivesFirst(group)


def _issued(work: dist.Work | None) -> dist.Work:
    assert work is not None  # noqa: S101 - every rank that calls is a member
    return work
