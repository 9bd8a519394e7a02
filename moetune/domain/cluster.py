"""Machines with their fingerprints, and groups of ranks placed on their nodes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import digest
from moetune.domain.errors import InputError, check_positive
from moetune.domain.units import format_bytes, parse_bytes

DeviceKind = Literal["cpu", "cuda"]
_PLANNABLE_PERCENT = 92
"""Percent of a GPU's free memory that plans may fill: free blocks of the allocator are not always
large enough."""
CONTEXT_BYTES = 2 * 2**30
"""Bytes of a GPU that are assumed for the CUDA context, loaded kernels and NCCL's buffers."""
_SEEN = 79.11 / 80
"""Share of the sold GB, counted as GiB, that torch reports: "a total capacity of 79.11 GiB"
(vllm-project/vllm#27508)."""
FASTER = " with computation × "
"""Words in the name of an imagined device, a real device with other speeds, which `whatif`
asks about."""
_SPEED_OF_SOFTWARE = ("torch", "backend", "nccl", "cuda", "cudnn", "driver", "threads_per_rank")
"""Software facts that change how fast operations are."""
HEADROOM = 0.05
"""Among plans that tie, the planner prefers a plan that leaves this share of memory free."""
HOST_MEMORY = "host_memory_bytes"
"""Name of a hardware fact of CUDA machines: memory of one host. A CPU uses its host's memory."""
DEVICE_MEMORY = "memory_bytes"
"""Name of a hardware fact: memory that torch reports for one device, with the CUDA context."""
NVLINK_PEERS = "nvlink_peers"
NUM_NICS = "nics"
"""Names of hardware facts of profile files: devices that NVLink joins, and cards of a node."""


def process_bytes(text: str) -> int:
    """Return the bytes that a process can use on a GPU of this size, as in reference machines.

    Args:
        text: "80GB" as it is sold, of which torch sees 79.11 GiB, or "79.11GiB" as torch sees it.

    Raises:
        InputError: the text is no size, or none is left after the context.
    """
    size = parse_bytes(text)
    unit = text.strip().lower().lstrip("0123456789. ")
    seen = int(size / 10**9 * 2**30 * _SEEN) if unit in {"gb", "g"} else size
    if seen <= CONTEXT_BYTES:
        raise InputError(
            f"a GPU of {text} has nothing left after {format_bytes(CONTEXT_BYTES)} of context",
            "give its whole memory, such as 80GB",
        )
    return seen - CONTEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device, how many there are and how they are grouped.

    Args:
        memory_bytes: memory of one device; on CUDA without context, kernels and NCCL's buffers.
    """

    kind: DeviceKind
    device: str
    num_devices: int
    devices_per_node: int
    memory_bytes: int

    def __post_init__(self) -> None:
        check_positive(self, "num_devices", "devices_per_node", "memory_bytes")

    @property
    def plannable_bytes(self) -> int:
        """Memory of one device that plans may fill."""
        percent = _PLANNABLE_PERCENT if self.kind == "cuda" else 100
        return self.memory_bytes * percent // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Hardware facts, which tell machines apart, and software facts, which date measurements.

    No host name and no serial number: nodes of one type share their measurements.
    """

    hardware: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)

    @property
    def hardware_id(self) -> str:
        """Hash of the hardware facts."""
        return digest(self.hardware)[:16]

    @property
    def software_id(self) -> str:
        """Hash of the software facts."""
        return digest(self.software)[:16]

    def software_changes(self, here: Mapping[str, str]) -> tuple[str, ...]:
        """Return facts of the software here that changed, such as "torch 2.12 there, 2.13 here"."""
        there = self.software
        return tuple(
            f"{name} {there.get(name, '—')} there, {here[name]} here"
            for name in _SPEED_OF_SOFTWARE
            if name in here and there and there.get(name) != here[name]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A detected machine with its fingerprint; `notes` name facts that could not be read."""

    machine: Machine
    fingerprint: Fingerprint
    notes: tuple[str, ...] = field(default=())


Group = tuple[int, int]
"""Ranks, and the nodes they are spread over evenly; 0 for consecutive ranks."""


def nodes_of(group: Group, machine: Machine) -> int:
    """Return the nodes that the group's ranks are on."""
    size, num_nodes = group
    return num_nodes or math.ceil(size / machine.devices_per_node)


def canonical(group: Group, machine: Machine) -> Group:
    """Return the canonical form: 0 nodes if consecutive ranks span the same number of nodes."""
    size, num_nodes = group
    return (size, 0 if num_nodes == nodes_of((size, 0), machine) else num_nodes)


def placement_name(group: Group, machine: Machine) -> str:
    """Return "4 ranks on 2 nodes"."""
    nodes = nodes_of(group, machine)
    return f"{group[0]} ranks on {nodes} node{'s' if nodes > 1 else ''}"


def torchrun(nodes: int | str, per_node: int | str, *, host: str = "NODE0") -> str:
    """Return the torchrun command for `per_node` ranks on each node, which meet on `host`."""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        f"--rdzv-endpoint {host}:29500"
    )
