"""Numbers of the rule between nodes, fitted to the published all-to-alls, and their check."""

import itertools
import math

from benchmarks.reference_profiles.facts import BETWEEN_NODES, ManyNodes
from moetune.domain.reference import Network

INFINIBAND_STARTUP = 4.5e-5
"""Seconds between nodes on InfiniBand: all-reduces of 1 MiB over two of eight H100, by one card and
by all (BastiaanGroot/ML-Infrastructure-Engineer), less what crosses: 39 and 51 µs."""
MESSAGE = 64 * 2**20
SOURCE = (
    "NIC rate of the data sheet; efficiency fitted to all-to-alls between nodes of eight B300 and "
    "H100 on EFA, awslabs/awsome-distributed-ai ep-backend-comparison, and taken to be alike; "
    "start-up of all-reduces on InfiniBand, BastiaanGroot/ML-Infrastructure-Engineer"
)
SPREAD = 0.15
"""Assumed: the largest error over the fitted rows is smaller."""


Numbers = tuple[float, float, float, float]
"""Efficiency, its loss per node, start-up in seconds, and that per node."""


def bus_bandwidth(row: ManyNodes, network: Network, num_bytes: float) -> float:
    """Return the rule's GB/s of an all-to-all with so many bytes on each of the row's ranks."""
    ranks = 8 * row.nodes
    crossing = num_bytes * (row.nodes - 1) / row.nodes
    seconds = network.startup(row.nodes) + crossing / network.bytes_per_second(row.nodes)
    return num_bytes * (ranks - 1) / ranks / seconds / 1e9


def network_of(nic_bytes_per_second: float, numbers: Numbers) -> Network:
    """Return the rule with those numbers: efficiency, its loss, start-up, and that per node."""
    efficiency, loss, startup, per_node = numbers
    return Network(
        source=SOURCE,
        nic_bytes_per_second=nic_bytes_per_second,
        efficiency=efficiency,
        loss_per_node=loss,
        most_nodes=max(row.nodes for row in BETWEEN_NODES),
        startup_seconds=startup,
        startup_seconds_per_node=per_node,
        spread=SPREAD,
    )


def fitted(rows: tuple[ManyNodes, ...] = BETWEEN_NODES) -> Numbers:
    """Return the numbers with the smallest largest error over the rows."""
    grid = itertools.product(
        [0.9, 0.92, 0.94, 0.96, 0.98, 1.0],
        [number / 1000 for number in range(2, 21, 2)],
        [number / 10**6 for number in range(60, 301, 20)],
        [number / 10**6 for number in range(0, 13, 2)],
    )
    return min(grid, key=lambda numbers: _largest_error(rows, numbers))


def left_out() -> list[tuple[ManyNodes, float, float]]:
    """Return each row with the rule's GB/s as fitted to the other rows."""
    rows = []
    for row in BETWEEN_NODES:
        network = network_of(
            row.nic * 1e9, fitted(tuple(entry for entry in BETWEEN_NODES if entry != row))
        )
        rows.append((row, bus_bandwidth(row, network, MESSAGE), bus_bandwidth(row, network, 1e15)))
    return rows


def errors(numbers: Numbers) -> list[tuple[ManyNodes, float, float]]:
    """Return each row with the rule's GB/s at 64 MiB and at the peak."""
    rows = []
    for row in BETWEEN_NODES:
        network = network_of(row.nic * 1e9, numbers)
        rows.append((row, bus_bandwidth(row, network, MESSAGE), bus_bandwidth(row, network, 1e15)))
    return rows


def _largest_error(rows: tuple[ManyNodes, ...], numbers: Numbers) -> float:
    worst = 0.0
    for row in rows:
        network = network_of(row.nic * 1e9, numbers)
        small, large = (bus_bandwidth(row, network, size) for size in (MESSAGE, 1e15))
        worst = max(worst, abs(math.log(small / row.at_64_mib)), abs(math.log(large / row.peak)))
    return worst
