"""Ranks that measure together: how layouts group them, and their communicators.

A session opens them first. Agreement uses other groups, of gloo, so that it never comes between
the collectives that are measured: a group for the main thread, and for that of a background load.
"""

import datetime as dt
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from moetune.comm.agree import largest
from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.group import Communicator
from moetune.domain.cluster import Group, Machine, canonical
from moetune.measure.device import Device

_TIMEOUT_SECONDS = 120.0
_MEMORY_STEP_BYTES = 2**28


def spread_groups(sizes: Sequence[int], machine: Machine) -> tuple[Group, ...]:
    """Return how layouts of the machine spread groups of those sizes evenly over nodes.

    Tensor parallelism takes consecutive ranks; an expert- or data-parallel group then takes
    every T-th rank, T a divisor of the node, so that k = devices_per_node / T ranks of each node
    belong to it; stages follow one another from node to node.

    Returns:
        Each size's spreads, those with the fewest ranks in a node first.
    """
    per_node = machine.devices_per_node
    num_nodes = machine.num_devices // per_node
    groups = [
        (size, size // here)
        for size in sorted(sizes)
        for here in range(1, per_node + 1)
        if size % here == 0 and per_node % here == 0 and 1 < size // here <= num_nodes
    ]
    return tuple(group for group in groups if canonical(group, machine) == group)


def members(group: Group, *, num_ranks: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every group of that kind; together they tile the ranks.

    Ranks beyond the last full group, or the last full set of nodes, belong to none.
    """
    size, num_nodes = group
    if not num_nodes:
        firsts = range(0, num_ranks - size + 1, size)
        return tuple(tuple(range(first, first + size)) for first in firsts)
    here = size // num_nodes
    stride = ranks_per_node // here
    nodes = range(0, num_ranks // ranks_per_node - num_nodes + 1, num_nodes)
    return tuple(
        tuple(
            node * ranks_per_node + lane + place * stride
            for node in range(first, first + num_nodes)
            for place in range(here)
        )
        for first in nodes
        for lane in range(stride)
    )


class MeasuringRanks:
    """This process's communicators. Without torch.distributed it is the only rank.

    Attributes:
        control: used by the main thread.
        votes: used by the thread of a background load.
    """

    def __init__(self) -> None:
        self.control, self.votes = (
            new_communicator(purpose=purpose, backend="gloo", timeout_seconds=_TIMEOUT_SECONDS)
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
                list(ranks), timeout=dt.timedelta(seconds=_TIMEOUT_SECONDS),
                group_desc="moetune: measured collectives",
            )  # fmt: skip
            if self.control.rank in ranks:
                mine = communicator_of(made)
        return mine

    def usable_bytes(self, device: Device) -> int | None:
        """Return the memory of the rank whose device has least, once an exchange has begun.

        NCCL allocates its buffers with the first exchange, by the number of peers. Rounded down, so
        that one machine's runs agree. None on a CPU.
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
