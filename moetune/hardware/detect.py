"""Detect this machine: its kind of device, their number and nodes, and its fingerprint.

A fact that cannot be read is "unknown", with a note.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from moetune.domain.cluster import HOST_MEMORY, Cluster, DeviceKind, Fingerprint, Machine
from moetune.domain.errors import InputError

UNKNOWN = "unknown"


Readers = dict[str, Callable[[], object]]
"""The function that reads each fact, by the fact's name."""


def read_facts(readers: Readers) -> tuple[dict[str, str], list[str]]:
    """Return facts by name, and notes on the facts that could not be read and are "unknown".

    The readers call drivers, files and libraries of many versions. Any exception, or None, means
    only that this fact is not available here.
    """
    values, notes = {}, []
    for name, reader in readers.items():
        try:
            value, reason = reader(), "not reported here"
        except Exception as error:  # noqa: BLE001 - see above
            first, *_ = (*str(error).splitlines(), "no message")
            value, reason = None, f"{type(error).__name__}: {first}"
        values[name] = UNKNOWN if value is None else str(value)
        if value is None:
            notes.append(f"{name} could not be read ({reason})")
    return values, notes


ROOT = Path("/")
# Kernels reserve slightly different memory; nodes of one type must have one fingerprint.
_MEMORY_STEP_BYTES = 2**28
# They decide the speed of a GEMM on a CPU.
_SPEED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def cpu_model(root: Path = ROOT) -> str | None:
    """Return the processor's name; None if the kernel does not report it."""
    return _cpuinfo(root, "model name") or _cpuinfo(root, "Model") or _cpuinfo(root, "CPU part")


def cpu_flags(root: Path = ROOT) -> str | None:
    """Return the instruction sets that matter to speed; None if they are unknown."""
    flags = _cpuinfo(root, "flags") or _cpuinfo(root, "Features")
    if flags is None:
        return None
    return " ".join(flag for flag in _SPEED_FLAGS if flag in flags.split()) or "none"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_numa_nodes(root: Path = ROOT) -> int | None:
    """Return the number of NUMA nodes; None if the kernel does not report it."""
    nodes = root / "sys/devices/system/node"
    return sum(1 for _ in nodes.glob("node[0-9]*")) or None


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may use within its control group's limit.

    The number is rounded down to 256 MiB, and is never 0.
    """
    limit = min((_total_bytes(root), *_cgroup_limits(root)))
    return max(limit // _MEMORY_STEP_BYTES * _MEMORY_STEP_BYTES, 1)


def _total_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("MemTotal is not in /proc/meminfo")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield every memory limit from this process's control group to the root, versions 1 and 2."""
    for folder, file in _cgroup_folders(root):
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            yield int(text)


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = Path(group.lstrip("/"))
        for folder in (path, *path.parents):
            yield base / folder, file


def _cpuinfo(root: Path, key: str) -> str | None:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip() or None
    return None


def _cuda_device() -> Readers:
    """Return readers of the first CUDA device; nodes are assumed to have devices of one kind."""

    def properties(name: str) -> object:
        return getattr(torch.cuda.get_device_properties(0), name, None)

    return {
        "device": lambda: properties("name"),
        "memory_bytes": lambda: properties("total_memory"),
        "sm_count": lambda: properties("multi_processor_count"),
        "l2_bytes": lambda: properties("L2_cache_size"),
        "compute_capability": lambda: f"{properties('major')}.{properties('minor')}",
        "peer_access": _peer_access,
    }


def _cuda_software(root: Path) -> Readers:
    """Return readers of CUDA's, cuDNN's, NCCL's and the driver's versions, and of two settings.

    TF32 makes float32 products several times as fast, and a throttled GPU is slower. The measured
    times do not show either.
    """
    return {
        "cuda": lambda: torch.version.cuda,
        "cudnn": torch.backends.cudnn.version,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "driver": lambda: _driver(root),
        "float32_products": torch.get_float32_matmul_precision,
        "throttling": _throttling,
    }


def _throttling() -> str:
    """Return "seen" if the clock, and so throttling, can be read; raise without nvidia-ml-py."""
    torch.cuda.clock_rate()
    return "seen"


def _peer_access() -> str:
    """Return how many ordered pairs of this node's devices have peer access."""
    count = torch.cuda.device_count()
    pairs = [(device, peer) for device in range(count) for peer in range(count) if device != peer]
    direct = sum(torch.cuda.can_device_access_peer(device, peer) for device, peer in pairs)
    return f"{direct} of {len(pairs)} pairs"


def _driver(root: Path) -> str | None:
    """Return the driver's version, such as 570.86.15, from the kernel module's file."""
    for file in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        path = root / file
        if path.exists():
            words = path.read_text().split()
            return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None


_PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "OMP_", "GLOO_")
# Parts of names that identify this node, this run or a path, and do not affect speed.
_NOT_SPEED = ("HOME", "PATH", "DIR", "FILE", "COMM_ID", "HOSTID", "LOG", "SHOW_CPP", "VISIBLE_")
_EMPTY: Mapping[str, str] = MappingProxyType({})


def detect(
    *,
    num_ranks: int = 1,
    ranks_per_node: int | None = None,
    environment: Mapping[str, str] = _EMPTY,
    threads_per_rank: int | None = None,
    root: Path = ROOT,
) -> Cluster:
    """Return the machine that `num_ranks` ranks run on, one device each.

    The device is CUDA if torch can use it, else the CPU. On a CPU a rank's device is its share of
    the cores and of the memory.

    Args:
        ranks_per_node: ranks on one node; the default is all ranks on a CPU, and the number of
            devices here on CUDA.
        environment: the process's environment; what can change speed is recorded as software.
        threads_per_rank: threads that each rank computes with; the default is torch's setting for
            one rank, and each rank's share of the cores for several.
        root: where /proc and /sys are.

    Raises:
        InputError: `num_ranks` does not divide into nodes of `ranks_per_node`.
    """
    kind: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
    here = min(num_ranks, torch.cuda.device_count()) if kind == "cuda" else num_ranks
    per_node = min(ranks_per_node or here, num_ranks)
    if num_ranks < 1 or per_node < 1 or num_ranks % per_node:
        raise InputError(
            f"{num_ranks} ranks do not divide into nodes of {per_node}",
            "start the same number of ranks on every node",
        )
    hardware, unread = read_facts(_hardware(kind, num_ranks, per_node, root))
    if threads_per_rank is None:
        shared = max(num_cores() // per_node, 1)
        threads_per_rank = torch.get_num_threads() if num_ranks == 1 else shared
    software, also_unread = read_facts(_software(kind, threads_per_rank, root))
    software |= {
        f"env.{name}": environment[name] for name in sorted(filter(_is_allowed, environment))
    }
    memory = hardware["memory_bytes"]
    return Cluster(
        machine=Machine(
            kind=kind,
            device=hardware["device"],
            num_devices=num_ranks,
            devices_per_node=per_node,
            memory_bytes=1 if memory == UNKNOWN else int(memory),
        ),
        fingerprint=Fingerprint(hardware=hardware, software=software),
        notes=(*unread, *also_unread),
    )


def _hardware(kind: DeviceKind, num_ranks: int, per_node: int, root: Path) -> Readers:
    readers: Readers = {
        "kind": lambda: kind,
        "num_devices": lambda: num_ranks,
        "devices_per_node": lambda: per_node,
        "cpu": lambda: cpu_model(root),
        "cpu_flags": lambda: cpu_flags(root),
        "cores": num_cores,
        "numa_nodes": lambda: num_numa_nodes(root),
    }
    if kind == "cuda":
        return readers | _cuda_device() | {HOST_MEMORY: lambda: memory_bytes(root)}
    return readers | {
        "device": lambda: cpu_model(root) or platform.machine() or None,
        "memory_bytes": lambda: max(memory_bytes(root) // per_node, 1),
    }


def _software(kind: DeviceKind, threads: int, root: Path) -> Readers:
    readers: Readers = {
        "moetune": lambda: importlib.metadata.version("moetune"),
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "kernel": lambda: os.uname().release,
        "backend": lambda: "nccl" if kind == "cuda" else "gloo",
        "threads_per_rank": lambda: threads,
    }
    return readers | (_cuda_software(root) if kind == "cuda" else {})


def _is_allowed(name: str) -> bool:
    return name.startswith(_PREFIXES) and not any(part in name for part in _NOT_SPEED)
