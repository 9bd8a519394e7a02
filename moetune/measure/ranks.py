"""The ranks that measure together: how layouts group them, and their communicators.

A session opens them first. Agreement uses separate gloo groups, so that it never delays the
measured collectives: a group for the main thread, and a group for a background load's thread.
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
    """Return how layouts of the machine spread groups of these sizes evenly over nodes.

    Tensor parallelism takes consecutive ranks. An expert- or data-parallel group then takes every
    T-th rank, and T divides the node. The group has k = devices_per_node / T ranks on each node.
    Pipeline stages follow each other from node to node.

    Returns:
        Each size's spreads, with the fewest ranks in a node first.
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
    """Return the ranks of every group of that kind; together the groups tile the ranks.

    Ranks beyond the last full group, or the last full set of nodes, belong to no group.
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
    """This process's communicators; without torch.distributed the process is the only rank.

    Attributes:
        control: communicator of the main thread.
        votes: communicator of a background load's thread.
    """

    def __init__(self) -> None:
        self.control, self.votes = (
            new_communicator(purpose=purpose, backend="gloo", timeout_seconds=_TIMEOUT_SECONDS)
            for purpose in ("control of the measurements", "votes of a background load")
        )
        self._groups: dict[Group, Communicator | None] = {}

    def open_groups(self, groups: Iterable[Group], *, ranks_per_node: int) -> None:
        """Make all groups of each kind; all ranks call this together.

        Groups of the same kind are measured at the same time, as they communicate in training.
        """
        alone = {(1, 0)}
        for group in sorted(set(groups) - self._groups.keys() - alone):
            self._groups[group] = self._open(group, ranks_per_node)

    def _open(self, group: Group, ranks_per_node: int) -> Communicator | None:
        """Make all groups of a kind; torch needs every rank to take part, even in no group."""
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
        """Return the usable memory of the rank whose device has least, after a first exchange.

        NCCL allocates its buffers in the first exchange, by the number of peers. The result is
        rounded down, so that runs on a machine agree. None on a CPU.
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
        """Return this rank's group of that kind; None if the rank is in no such group."""
        return self._groups[group]
