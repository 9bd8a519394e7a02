"""Groups of ranks that are measured: how layouts spread them over nodes, and who is in each."""

from collections.abc import Sequence

from moetune.domain.cluster import Group, Machine, canonical


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
