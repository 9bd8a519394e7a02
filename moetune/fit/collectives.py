"""Stand-ins for collectives that were not measured: the nearest known group, and a ratio."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.cluster import Group, Machine, nodes_of
from moetune.domain.costs import Trust, least_trust
from moetune.domain.samples import CollectiveOp
from moetune.fit.curve import Line
from moetune.fit.index import Points, ProfileIndex


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
    """Return the known group that stands in for another, and its bytes for one of the other's.

    Groups on the same kind of wire, inside a node or between nodes, come first; of them, those
    placed alike, and then the size nearest in ratio. No ratio between different wires is known, so
    there the times are taken as they are.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The points or line to predict a collective from.

    Args:
        factor: its bytes for one of the wanted collective's.
        cap: most that a prediction from it can be trusted.
    """

    found: Points | Line
    label: str
    factor: float
    cap: Trust


def nearest_source(
    index: ProfileIndex, op: CollectiveOp, group: Group, in_flight: int, *, allow_modelled: bool
) -> Source | None:
    """Return what to predict the collective from; None where nothing is known that may be used.

    Args:
        allow_modelled: whether another group may stand in.
    """
    known = index.groups(op)
    cap: Trust = "measured"
    factor = 1.0
    if group not in known:
        if not (known and allow_modelled):
            return None
        cap = "modelled"
        group, factor = nearest_group(op, group, known, index.profile.machine)
    flight, flight_cap = _nearest_flight(in_flight, index.in_flight(op, group))
    key = (op, *group, flight)
    return Source(
        found=index.collective(key),
        label=f"collective {key}",
        factor=factor,
        cap=least_trust((cap, flight_cap)),
    )


def _nearest_flight(wanted: int, known: Sequence[int]) -> tuple[int, Trust]:
    """Return the known number in flight that stands in for another, and the most trust in it."""
    if wanted in known:
        return wanted, "measured"
    several = [one for one in known if one > 1]
    if wanted > 1 and several:
        return _nearest(wanted, several), "interpolated"
    return _nearest(wanted, known), "extrapolated"


def _nearest(wanted: int, known: Sequence[int]) -> int:
    """Return the known number nearest in ratio, the smaller of two as near."""
    return min(known, key=lambda one: (abs(math.log(one / wanted)), one))
