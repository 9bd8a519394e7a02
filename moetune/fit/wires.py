"""What of a collective crosses the slowest wire: how one group's times follow from another's.

g ranks of a group, k of them in each node; groups of one kind tile the cluster and share the
wire between nodes.
"""

import math
from collections.abc import Sequence

from moetune.domain.hardware import Machine
from moetune.domain.placement import Group, nodes_of
from moetune.domain.samples import CollectiveOp


def wire_share(op: CollectiveOp, group: Group, machine: Machine) -> float:
    """Return the bytes on the slowest wire for each input byte of one rank.

    Inside a node that is what one rank sends, between nodes what one node does: in a ring one
    rank of each of its groups sends to another node, in an all-to-all every rank does.

    Source: ring all-reduce sends 2·(g − 1)/g of its input, Patarasuk and Yuan, JPDC 69 (2009).
    """
    size, _ = group
    passed = {
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_gather": size - 1.0,
        "all_to_all": (size - 1) / size,
        "send": 1.0,
    }[op]
    nodes = nodes_of(group, machine)
    if nodes == 1:
        return passed
    here = math.ceil(size / nodes)
    if op == "all_to_all":
        return machine.devices_per_node * (size - here) / size
    return passed * machine.devices_per_node / here


def nearest_group(
    op: CollectiveOp, wanted: Group, known: Sequence[Group], machine: Machine
) -> tuple[Group, float]:
    """Return the known group that stands in for another, and how many of its bytes stand for one.

    Groups on the same kind of wire, inside a node or between nodes, come first; of them, those
    placed alike, and then the size nearest in ratio. Another wire says nothing of this one, so
    its times are taken as they are.
    """

    def crosses(group: Group) -> bool:
        return nodes_of(group, machine) > 1

    def distance(group: Group) -> tuple[float, ...]:
        size, nodes = group
        return (
            crosses(group) != crosses(wanted),
            (nodes == 0) != (wanted[1] == 0),
            abs(math.log(size / wanted[0])),
            size,
            abs(nodes - wanted[1]),
            nodes,
        )

    nearest = min(known, key=distance)
    if crosses(nearest) != crosses(wanted):
        return nearest, 1.0
    return nearest, wire_share(op, wanted, machine) / wire_share(op, nearest, machine)
