"""Where the ranks of a group are: how many nodes they are spread over, and which ranks they are."""

import math
from collections.abc import Sequence

from moetune.domain.hardware import Machine

Group = tuple[int, int]
"""Ranks, and the nodes they are spread over evenly; 0 for consecutive ranks."""


def nodes_of(group: Group, machine: Machine) -> int:
    """Return the nodes that the group's ranks are on."""
    size, num_nodes = group
    return num_nodes or math.ceil(size / machine.devices_per_node)


def canonical(group: Group, machine: Machine) -> Group:
    """Return the group with 0 nodes where consecutive ranks are on as many."""
    size, num_nodes = group
    return (size, 0 if num_nodes == nodes_of((size, 0), machine) else num_nodes)


def placement_name(group: Group, machine: Machine) -> str:
    """Return "4 ranks", and where the machine has several nodes, "4 ranks on 2 nodes"."""
    size, num_nodes = group
    if not num_nodes and machine.num_devices <= machine.devices_per_node:
        return f"{size} ranks"
    nodes = nodes_of(group, machine)
    return f"{size} ranks on {nodes} node{'s' if nodes > 1 else ''}"


def spread_groups(sizes: Sequence[int], machine: Machine) -> tuple[Group, ...]:
    """Return the even spreads of groups of those sizes that layouts of the machine have.

    Tensor parallelism takes consecutive ranks; an expert- or data-parallel group then takes
    every T-th rank, T a divisor of the node, so that ranks of k = devices_per_node / T places
    in each node belong to it; stages follow one another from node to node.

    Returns:
        Each size's spreads, those with the fewest ranks in a node first.
    """
    per_node = machine.devices_per_node
    num_nodes = machine.num_devices // per_node
    found = [
        (size, size // here)
        for size in sorted(sizes)
        for here in range(1, per_node + 1)
        if size % here == 0 and per_node % here == 0 and 1 < size // here <= num_nodes
    ]
    return tuple(group for group in found if canonical(group, machine) == group)


def members(group: Group, *, num_ranks: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every group of that kind; together they tile the ranks.

    Consecutive groups and nodes that the ranks do not fill are left over.
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
