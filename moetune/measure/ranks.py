"""Communicators of the ranks that measure together: the measured groups, and two for agreement.

A session opens them first. Agreement uses gloo groups of its own, so that it never comes between
the collectives that are measured: one for the main thread, one for the thread of a background load.
"""

import datetime as dt
from collections.abc import Iterable

import torch
import torch.distributed as dist

from moetune.comm.agree import largest
from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.group import Communicator
from moetune.domain.cluster import Group
from moetune.measure.device import Device
from moetune.measure.groups import members

_TIMEOUT_SECONDS = 120.0
_MEMORY_STEP_BYTES = 2**28


class MeasuringRanks:
    """This process's communicators. Without torch.distributed it is the only rank.

    Attributes:
        control: used by the main thread.
        votes: used by the thread of a background load.

    Args:
        timeout_seconds: how long a rank waits for the others before it gives up.
    """

    def __init__(self, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self.control, self.votes = (
            new_communicator(purpose=purpose, backend="gloo", timeout_seconds=timeout_seconds)
            for purpose in ("control of the measurements", "votes of a background load")
        )
        self._groups: dict[Group, Communicator | None] = {}

    def open_groups(self, groups: Iterable[Group], *, ranks_per_node: int) -> None:
        """Form all groups of each kind, on all ranks together.

        Groups of one kind are measured at the same time, as they communicate in training.
        """
        alone = {(1, 0)}
        for group in sorted(set(groups) - self._groups.keys() - alone):
            self._groups[group] = self._open(group, ranks_per_node)

    def _open(self, group: Group, ranks_per_node: int) -> Communicator | None:
        """Form all groups of one kind: torch wants all ranks to take part, even those in none."""
        mine: Communicator | None = None
        for ranks in members(
            group, num_ranks=self.control.num_ranks, ranks_per_node=ranks_per_node
        ):
            made = dist.new_group(
                list(ranks), timeout=dt.timedelta(seconds=self._timeout_seconds),
                group_desc="moetune: measured collectives",
            )  # fmt: skip
            if self.control.rank in ranks:
                mine = communicator_of(made)
        return mine

    def usable_bytes(self, device: Device) -> int | None:
        """Return the memory of the rank whose device has least, once an exchange has begun.

        NCCL allocates its buffers with the first one, by the number of peers. Rounded down, so that
        one machine's runs agree. None on a CPU.
        """
        everybody = self._groups[self.control.num_ranks, 0] if self.control.num_ranks > 1 else None
        if everybody is not None:
            mine = torch.zeros(everybody.num_ranks, device=device.torch_device)
            everybody.all_to_all_blocks(mine, "the first exchange")
        usable_bytes = device.usable_bytes()
        if usable_bytes is None:
            return None
        (least,) = largest(self.control, (-usable_bytes,), "usable memory")
        return int(-least) // _MEMORY_STEP_BYTES * _MEMORY_STEP_BYTES

    def group(self, group: Group) -> Communicator | None:
        """Return this rank's group of that kind, None if it is in none."""
        return self._groups[group]
