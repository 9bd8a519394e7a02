"""Collectives that were not measured: scaled from the nearest known group, or predicted by a rule.

The rule covers groups of more nodes, and groups of more ranks inside a node:

    between nodes    startup(N) + max(inside, crossing bytes / rate)
    inside a node    the nearest group at as many bytes on the wire, + growth of its start-up

`startup` and `rate` are those of `Network`. In an all-to-all the rate falls with the number of
nodes, in a ring it does not. Crossing bytes are those of a whole node (`wire_share`). In an
all-to-all every rank sends y·(P − p)/P to other nodes, with p of P ranks in each node. In a ring
y·2·(P − 1)/P (all-reduce), or half of that, cross once a node. `inside` is the time that the p
ranks of one node take for the traffic that stays there. A send uses only its rank's network cards.

The start-up of all-gather and reduce-scatter grows with the ranks, and their rate falls with the
nodes; switches reduce an all-reduce. Inside a node the start-up of an all-to-all grows with every
peer, that of the others with every doubling. The slope is that between the two largest known
groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cluster import Group, Machine, nodes_of
from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.costs import Trust, least_trust
from moetune.domain.reference import Network
from moetune.domain.samples import CollectiveOp
from moetune.fit.curve import Times
from moetune.fit.extrapolation import SPREAD_OF_FLIGHT, SPREAD_OF_WIRE, spread_of_group
from moetune.fit.index import Points, ProfileIndex, Source


def wire_share(op: CollectiveOp, group: Group, machine: Machine) -> float:
    """Return the bytes on the slowest wire for each input byte of one rank.

    The bytes are those of one rank inside a node, and those of a whole node between nodes. In a
    ring one rank per group of the node sends to another node; in an all-to-all every rank does.

    Source: ring all-reduce sends 2·(g − 1)/g of its input, Patarasuk and Yuan, JPDC 69 (2009).
    """
    size, nodes = group[0], nodes_of(group, machine)
    passed = _sent_share(op, size)
    if nodes == 1:
        return passed
    here = math.ceil(size / nodes)
    if op == "all_to_all":
        return machine.devices_per_node * (size - here) / size
    return passed * machine.devices_per_node / here


def _sent_share(op: CollectiveOp, size: int) -> float:
    """Return the bytes that a rank sends inside a node for each input byte."""
    around = (size - 1) / size
    shares = {"all_reduce": 2 * around, "all_gather": size - 1.0, "send": 1.0}
    return shares.get(op, around)


def nearest_group(
    op: CollectiveOp, wanted: Group, groups: Sequence[Group], machine: Machine
) -> tuple[Group, float]:
    """Return the known group that stands in for another, and its bytes per byte of the other group.

    Groups on the same kind of wire (inside a node, or between nodes) come first. Then come groups
    with the same kind of placement, and then the nearest size by ratio. Between different kinds of
    wire no ratio is known, so the factor is 1.
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

    nearest = min(groups, key=distance)
    if crosses(nearest) != crosses(wanted):
        return nearest, 1.0
    return nearest, wire_share(op, wanted, machine) / wire_share(op, nearest, machine)


def nearest_collective(
    index: ProfileIndex, wanted: CollectiveKey, *, allow_modelled: bool
) -> Source | None:
    """Return the known collective that predicts a canonical group; None if none may stand in."""
    groups, machine = index.groups(wanted.op), index.profile.machine
    group, stretch, spread = wanted.group, 1.0, 0.0
    cap: Trust = "measured"
    if group not in groups:
        if not (groups and allow_modelled):
            return None
        cap = "modelled"
        group, stretch = nearest_group(wanted.op, group, groups, machine)
        wires = {nodes_of(either, machine) > 1 for either in (wanted.group, group)}
        is_alike = len(wires) == 1
        spread = spread_of_group(wanted.group_size, group[0]) if is_alike else SPREAD_OF_WIRE
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


def _nearest_flight(wanted: int, numbers: Sequence[int]) -> tuple[int, Trust]:
    """Return the known number in flight nearest to the wanted number, and the trust it caps."""
    if wanted in numbers:
        return wanted, "measured"
    several = [number for number in numbers if number > 1 and wanted > 1]
    nearest = min(several or numbers, key=lambda number: (abs(math.log(number / wanted)), number))
    return nearest, "interpolated" if several else "extrapolated"


_RINGS = ("all_gather", "reduce_scatter")
_RING_HOP_SECONDS, _RING_LOSS, _RING_LOSS_PER_NODE = 5e-6, 1.07, 0.0018
"""Start-up for each rank of a ring, and the factors by which a ring's bytes take longer than an
exchange's: constant, and for each node. They come from all-gathers of 2 and 8 GB on 16 to 512 B200
with eight 400 Gbit/s cards a node (together-dgxc-benchmarking, NCCL 2.29.7). The rule meets eleven
of twelve within 5 %, and the last within 13 %."""
_SEND_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """The rule's times of one collective over one group.

    Args:
        inside: times of the ranks of one node; None for a single rank in each node.
        inside_share: size inside a node for each byte of the collective.
        crossing_seconds_per_byte: 0 inside a node.
        startup_seconds: shape (curves, 1).
    """

    inside: Times | None = None
    inside_share: float = 0.0
    crossing_seconds_per_byte: float = 0.0
    startup_seconds: Floats

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes, shape (curves, sizes)."""
        seconds = self.crossing_seconds_per_byte * np.atleast_2d(sizes)
        if self.inside is not None:
            seconds = np.maximum(seconds, self.inside.seconds_at(self.inside_share * sizes))
        return self.startup_seconds + seconds


def rule_of(
    key: CollectiveKey, *, index: ProfileIndex, predictor: Callable[[CollectiveKey], Times]
) -> Ruled | None:
    """Return the rule for a group, built on known groups; None without these or a network."""
    machine, network, op = index.profile.machine, index.profile.network, key.op
    of_one_node = [group for group in index.groups(op) if nodes_of(group, machine) == 1]
    nodes = nodes_of(key.group, machine)
    here = math.ceil(key.group_size / nodes)
    if op == "send":
        here = min(_SEND_RANKS, machine.devices_per_node)
    if network is None or (here > 1 and not of_one_node):
        return None
    if nodes > 1:
        inside = predictor(CollectiveKey(op, here)) if here > 1 else None
        return _between_nodes(key, machine=machine, network=network, inside=inside)
    near, factor = nearest_group(op, key.group, of_one_node, machine)
    startups = [
        (size, predictor(CollectiveKey(op, size)).seconds_at(np.zeros(1)))
        for size in sorted({size for size, _ in of_one_node})
        if size <= near[0]
    ]
    return Ruled(
        inside=predictor(CollectiveKey(op, *near)),
        inside_share=factor,
        startup_seconds=_startup_growth(key, startups),
    )


def _between_nodes(
    key: CollectiveKey, *, machine: Machine, network: Network, inside: Times | None
) -> Ruled:
    """Return the rule for several nodes; `inside` holds the times inside a node."""
    op, size = key.op, key.group_size
    nodes = nodes_of(key.group, machine)
    here = math.ceil(size / nodes)
    rate = network.bytes_per_second(nodes if op == "all_to_all" else 0)
    startup = np.full((1, 1), network.startup(nodes))
    if op == "send":
        return Ruled(
            crossing_seconds_per_byte=1 / rate,
            startup_seconds=inside.seconds_at(np.zeros(1)) if inside else startup,
        )
    # Inside a node its ranks move as many bytes as they do in the whole group.
    inside_share = here / size
    if op != "all_to_all" and here > 1:
        inside_share = _sent_share(op, size) / _sent_share(op, here)
    crossing = wire_share(op, key.group, machine) / (machine.devices_per_node * rate)
    if op in _RINGS:
        crossing *= _RING_LOSS * (1 + _RING_LOSS_PER_NODE * nodes)
        startup = startup + _RING_HOP_SECONDS * size
    return Ruled(
        inside=inside if here > 1 else None,
        inside_share=inside_share if here > 1 else 0.0,
        crossing_seconds_per_byte=crossing,
        startup_seconds=startup,
    )


def _startup_growth(key: CollectiveKey, startups: Sequence[tuple[int, Floats]]) -> Floats:
    """Return the growth of the start-up beyond the known groups, given in ascending order."""
    if len(startups) == 1:
        return np.zeros((1, 1))
    (fewer, before), (more, after) = startups[-2:]
    wanted = key.group_size
    steps = (
        (wanted - more) / (more - fewer)
        if key.op == "all_to_all"
        else math.log2(wanted / more) / math.log2(more / fewer)
    )
    return np.maximum(after - before, 0.0) * max(steps, 0.0)
