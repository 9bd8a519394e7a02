"""Hardware facts of a profile's machine that rules of layouts need; None if not known.

Rules treat None as the least capable machine: no NVLink, no narrow formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from moetune.domain.chips import Capability, Chip, Generation, Vendor, chip_of, generation_of
from moetune.domain.cluster import HOST_MEMORY, NUM_NICS, NVLINK_PEERS, Machine
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.training import CudaGraphs, TrainingDtype

_CAPABILITY = "compute_capability"
_ROOM_PERCENT = 10
"""Percent of a host's memory that is assumed for its system, page cache and data loaders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The hardware of one machine.

    Args:
        vendor: vendor of the devices; "cpu" where ranks compute on the host.
        chip: name in lower case, such as "h100", "gb200", "rtx4090", "mi300x".
        capability: NVIDIA's compute capability, (major, minor).
        devices_per_node: devices of one host, under one operating system: 4 on GB200 and GB300,
            where `Machine.devices_per_node` is the whole NVLink domain.
        nvlink_peers: devices that NVLink or NVSwitch joins in one domain: 8 on HGX boards, 72 on
            NVL72, 4 on nodes of four GH200; 0 without NVLink.
        num_nics: network cards of one host; 0 where the machine has no network.
        nic_bytes_per_second: rate of one device's share of the cards, one way; 0 without a network.
    """

    vendor: Vendor | None
    chip: str | None
    generation: Generation | None
    capability: Capability | None
    devices_per_node: int
    nvlink_peers: int | None
    num_nics: int | None
    nic_bytes_per_second: float | None
    host_memory_bytes: int | None

    def host_bytes_per_rank(self, ranks: int) -> int | None:
        """Return the host memory that each of `ranks` ranks may fill; None if not known.

        It is an equal share of the host's memory, less room for the system. For ranks on a CPU it
        is the memory of a process, which leaves that room already.
        """
        if self.host_memory_bytes is None:
            return None
        percent = 100 if self.vendor == "cpu" else 100 - _ROOM_PERCENT
        return self.host_memory_bytes * percent // 100 // min(self.devices_per_node, ranks)

    def multiplies(self, dtype: str) -> bool | None:
        """Return whether the devices' units multiply a narrow format; None if not known.

        Transformer Engine's `check_fp8_support`, `check_mxfp8_support` and `check_nvfp4_support`
        (`transformer_engine/pytorch/quantization.py`) ask for compute capability 8.9, 10.0 and
        10.0, and have no MXFP8 from 12.0 on. CDNA 3 multiplies FP8, and CDNA 4 MXFP8, too.

        Args:
            dtype: "fp8", "fp8_rowwise", "mxfp8" or "nvfp4"; any other dtype is not narrow.
        """
        form = _FORMATS.get(dtype)
        if form is None:
            return True
        if self.vendor == "cpu":
            return False
        if self.vendor == "amd":
            return None if self.generation is None else self.generation in form.of_amd
        if self.capability is None:
            return None
        return form.least <= self.capability < form.until


def check_format(profile: Profile, dtype: str) -> None:
    """Raise InputError if a profile's GPUs are known not to multiply a narrow format."""
    site = site_of(profile)
    if site.vendor == "cpu" or site.multiplies(dtype) is not False:
        return
    words = " or ".join(["bfloat16", *filter(site.multiplies, ("fp8", "mxfp8", "nvfp4"))])
    raise InputError(
        f"{profile.machine.device} has no units that multiply {dtype}",
        f"use --dtype {words}, or a machine that has them: {_FORMATS[dtype].machines}",
    )


class _Format(NamedTuple):
    """Devices that multiply a narrow format: NVIDIA's by capability, AMD's by generation."""

    least: Capability
    of_amd: tuple[Generation, ...]
    machines: str
    until: Capability = (99, 0)


_FP8 = _Format((8, 9), ("cdna3", "cdna4"), "Ada, Hopper, Blackwell, CDNA 3 or CDNA 4")
_FORMATS: Mapping[str, _Format] = MappingProxyType({
    "fp8": _FP8, "fp8_rowwise": _FP8,
    "mxfp8": _Format((10, 0), ("cdna4",), "Blackwell of data centers, or CDNA 4", until=(12, 0)),
    "nvfp4": _Format((10, 0), (), "Blackwell"),
})  # fmt: skip


def site_of(profile: Profile) -> Site:
    """Return the hardware of a profile's machine, from its facts or else from its device's name.

    The facts in `[fingerprint.hardware]` are measured, or written in a reference's file.
    """
    machine, facts = profile.machine, profile.fingerprint.hardware
    chip = chip_of(machine.device) if machine.kind == "cuda" else None
    capability = _capability(facts.get(_CAPABILITY, ""), chip)
    generation = chip.generation if chip else capability and generation_of(capability)
    peers = _number(facts.get(NVLINK_PEERS, ""))
    num_nics, per_host = _number(facts.get(NUM_NICS, "")), machine.devices_per_node
    if chip is not None and chip.most_per_host:
        per_host = min(per_host, chip.most_per_host)
    if num_nics is not None:
        num_nics = num_nics * per_host // machine.devices_per_node
    return Site(
        vendor=_vendor(machine, chip, capability),
        chip=chip.name if chip else None,
        generation=generation,
        capability=capability,
        devices_per_node=per_host,
        nvlink_peers=_peers(machine, chip) if peers is None else peers,
        num_nics=num_nics if num_nics is not None or _has_network(profile) else 0,
        nic_bytes_per_second=_nic_rate(profile),
        host_memory_bytes=_host_memory(profile),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _capability(text: str, chip: Chip | None) -> Capability | None:
    """Return the measured capability, else the chip's; None for ROCm's different numbers."""
    if chip is not None and chip.vendor != "nvidia":
        return None
    major, _, minor = text.partition(".")
    if major.isdigit() and minor.isdigit():
        return int(major), int(minor)
    return chip.capability if chip else None


def _vendor(machine: Machine, chip: Chip | None, capability: Capability | None) -> Vendor | None:
    if machine.kind == "cpu":
        return "cpu"
    if chip is not None:
        return chip.vendor
    name = machine.device.lower()
    if "amd" in name.split() or "instinct" in name:
        return "amd"
    return "nvidia" if capability is not None or "nvidia" in name else None


def _peers(machine: Machine, chip: Chip | None) -> int | None:
    if machine.kind == "cpu":
        return 0
    if chip is None:
        return None
    is_joined = chip.links == "nvlink" and machine.devices_per_node > 1
    return machine.devices_per_node if is_joined else 0


def _has_network(profile: Profile) -> bool:
    machine = profile.machine
    return profile.network is not None or machine.num_devices > machine.devices_per_node


def _nic_rate(profile: Profile) -> float | None:
    if profile.network is not None:
        return profile.network.nic_bytes_per_second
    return None if _has_network(profile) else 0.0


def _host_memory(profile: Profile) -> int | None:
    machine = profile.machine
    if machine.kind == "cpu":
        return machine.memory_bytes * machine.devices_per_node
    return _number(profile.fingerprint.hardware.get(HOST_MEMORY, ""))


class GraphsInRecipes(NamedTuple):
    """CUDA graphs that a runtime's recipes use.

    Args:
        dtypes: dtypes of the recipes; empty for any dtype.
    """

    graphs: CudaGraphs
    generations: frozenset[Generation]
    dtypes: tuple[TrainingDtype, ...] = ()


_GRAPHS_CORE = (0, 18)
"""First core whose FSDP has a mode for graphs, `megatron_fsdp_cuda_graph_mode`."""


def graphs_in_recipes(core: tuple[int, int]) -> tuple[GraphsInRecipes, ...]:
    """Return the graphs of Megatron-Bridge 0.6.0 in `src/megatron/bridge/perf_recipes`.

    Recipes of H100, B200, B300, GB200 and GB300 have `cuda_graph_impl="transformer_engine"` in any
    precision. "full_iteration" is in `_enable_hybridep_full_iteration_mxfp8` of `qwen/common.py`,
    and in no recipe of H100.
    """
    if core < _GRAPHS_CORE:
        return ()
    return (
        GraphsInRecipes("partial", frozenset({"hopper", "blackwell"})),
        GraphsInRecipes("full", frozenset({"blackwell"}), ("mxfp8",)),
    )
