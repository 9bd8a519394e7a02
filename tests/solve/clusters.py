"""A profile of lines for a cluster, from the bandwidths of its wires."""

from moetune.domain.cluster import Machine
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.samples import CollectiveOp

GB = 1e9
LATENCY_SECONDS = {True: 2e-5, False: 5e-6}


def cluster_profile(
    *,
    num_devices: int = 32,
    per_node: int = 8,
    inside: float = 130 * GB,
    between: float = 12.5 * GB,
    seconds_per_mac: float = 2e-14,
    memory_bytes: int = 32 * 2**30,
    dtypes: tuple[str, ...] = ("float16", "float32"),
    without: tuple[CollectiveOp, ...] = (),
) -> Profile:
    """Return lines for every power of two, on consecutive ranks and spread over nodes.

    Args:
        inside: bytes a second of one device to the others of its node.
        between: bytes a second of one node to the others, shared by its devices.
        without: collectives that were not measured.
    """
    lines = []
    ops: tuple[CollectiveOp, ...] = (
        "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
    )  # fmt: skip
    for op in ops:
        sizes = [2] if op == "send" else _powers(num_devices)
        for size in [] if op in without else sizes:
            lines += [
                _line(op, size, nodes, per_node, inside, between)
                for nodes in _placements(size, per_node, num_devices)
            ]
    return Profile(
        name="cluster",
        provenance="modelled",
        citation="bandwidths",
        machine=Machine(
            kind="cuda", device="a GPU", num_devices=num_devices, devices_per_node=per_node,
            memory_bytes=memory_bytes,
        ),
        gemm=tuple(
            GemmLine(dtype=dtype, alpha_seconds=2e-5, beta_seconds_per_mac=seconds_per_mac)
            for dtype in dtypes
        ),
        collective=tuple(lines),
    )  # fmt: skip


def _powers(largest: int) -> list[int]:
    return [2**exponent for exponent in range(1, largest.bit_length()) if 2**exponent <= largest]


def _placements(size: int, per_node: int, num_devices: int) -> list[int]:
    """Return 0 for consecutive ranks, and every larger number of nodes."""
    compact = max(1, size // per_node)
    most = min(size, num_devices // per_node)
    return [0, *(nodes for nodes in _powers(most) if nodes > compact)]


def _line(
    op: CollectiveOp, size: int, nodes: int, per_node: int, inside: float, between: float
) -> CollectiveLine:
    """Return a ring's or a direct exchange's line, over one rank's input bytes."""
    nodes = nodes or max(1, size // per_node)
    crosses = nodes > 1
    factor = {
        "all_to_all": (size - 1) / size, "all_reduce": 2 * (size - 1) / size,
        "all_gather": size - 1.0, "reduce_scatter": (size - 1) / size, "send": 1.0,
    }[op]  # fmt: skip
    bandwidth = inside
    if crosses:
        # The groups that tile a node share its wire; a ring crosses it once for each group.
        ranks_a_node = size / nodes
        sharers = per_node / ranks_a_node
        share = between / (per_node if op in {"all_to_all", "send"} else sharers)
        bandwidth = min(inside, share)
    return CollectiveLine(
        op=op,
        group_size=size,
        alpha_seconds=LATENCY_SECONDS[crosses] * (size - 1),
        beta_seconds_per_byte=factor / bandwidth,
        num_nodes=0 if nodes == max(1, size // per_node) else nodes,
    )
