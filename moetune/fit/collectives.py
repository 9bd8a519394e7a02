"""Stand-ins for collectives that were not measured: the nearest known group, and a ratio."""

import math
from collections.abc import Sequence

from moetune.domain.cluster import Group, Machine, nodes_of
from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.costs import Trust, least_trust
from moetune.domain.samples import CollectiveOp
from moetune.fit.extrapolation import SPREAD_OF_FLIGHT, SPREAD_OF_WIRE, spread_of_group
from moetune.fit.index import Points, ProfileIndex, Source


def wire_share(op: CollectiveOp, group: Group, machine: Machine) -> float:
    """Return the bytes on the slowest wire for each input byte of one rank.

    Inside a node one rank's bytes, between nodes one node's: in a ring one rank of each of the
    node's groups sends to another node, in an all-to-all every rank does.

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


def nearest_collective(
    index: ProfileIndex, wanted: CollectiveKey, *, allow_modelled: bool
) -> Source | None:
    """Return what to predict the collective from; None where nothing is known that may be used.

    Args:
        wanted: of a group as `cluster.canonical` has it.
        allow_modelled: whether another group may stand in.
    """
    groups, machine = index.groups(wanted.op), index.profile.machine
    group, stretch, spread = wanted.group, 1.0, 0.0
    cap: Trust = "measured"
    if group not in groups:
        if not (groups and allow_modelled):
            return None
        cap = "modelled"
        group, stretch = nearest_group(wanted.op, group, groups, machine)
        spread = _spread_of_group(wanted.group, group, machine)
    flight, flight_cap = _nearest_flight(wanted.in_flight, index.in_flight(wanted.op, group))
    near = CollectiveKey(wanted.op, *group, flight)
    basis = index.basis(near)
    assert basis is not None  # noqa: S101 - the group is known with that number in flight
    if flight_cap == "extrapolated" and isinstance(basis, Points) and basis.origin is None:
        spread = math.hypot(spread, SPREAD_OF_FLIGHT)
    return Source(
        key=near,
        basis=basis,
        stretch=stretch,
        cap=least_trust((cap, flight_cap)),
        spread=spread,
        stand_in=near.words if spread else "",
    )


def _spread_of_group(wanted: Group, known: Group, machine: Machine) -> float:
    if (nodes_of(wanted, machine) > 1) != (nodes_of(known, machine) > 1):
        return SPREAD_OF_WIRE
    return spread_of_group(wanted[0], known[0])


def _nearest_flight(wanted: int, known: Sequence[int]) -> tuple[int, Trust]:
    """Return the known number in flight that stands in for another, and the most trust in it.

    A published line or table is taken to hold for any number.
    """
    if wanted in known:
        return wanted, "measured"
    several = [one for one in known if one > 1]
    if wanted > 1 and several:
        return _nearest(wanted, several), "interpolated"
    return _nearest(wanted, known), "extrapolated"


def _nearest(wanted: int, known: Sequence[int]) -> int:
    """Return the known number nearest in ratio, the smaller of two as near."""
    return min(known, key=lambda one: (abs(math.log(one / wanted)), one))
