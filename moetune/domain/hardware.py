"""The machine: what it is (identity) and the software on it (validity)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import digest
from moetune.domain.errors import InputError

DeviceKind = Literal["cpu", "cuda"]
HOST_MEMORY = "host_memory_bytes"
"""Among the hardware facts of a CUDA machine; a CPU's own memory is its host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of device, how many there are and how they are grouped.

    Args:
        memory_bytes: memory of one device.
    """

    kind: DeviceKind
    device: str
    num_devices: int
    devices_per_node: int
    memory_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node", "memory_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Facts in two parts: hardware tells machines apart, software says if numbers hold.

    No host name and no serial number: nodes of one type share what they measured.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A detected machine with its fingerprint; `notes` are what could not be read."""

    machine: Machine
    fingerprint: Fingerprint
    notes: tuple[str, ...] = field(default=())
