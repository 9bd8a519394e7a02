"""Facts about this machine, read by name: one that cannot be read is "unknown", with a note."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

UNKNOWN = "unknown"


class Facts:
    """Facts by name, and notes on those that could not be read."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.notes: list[str] = []

    def read(self, name: str, reader: Callable[[], object]) -> str:
        """Record what `reader` returns under `name`; None or an error is "unknown".

        The readers call drivers, files and libraries of many versions: whatever one of them
        raises means only that this fact is not available here.
        """
        try:
            value = reader()
        except Exception as error:  # noqa: BLE001 - see above
            return self._unknown(name, f"{type(error).__name__}: {_first_line(error)}")
        if value is None:
            return self._unknown(name, "not reported here")
        self.values[name] = str(value)
        return self.values[name]

    def _unknown(self, name: str, reason: str) -> str:
        self.values[name] = UNKNOWN
        self.notes.append(f"{name} could not be read ({reason})")
        return UNKNOWN


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else "no message"


ROOT = Path("/")
# Kernels reserve slightly different memory; nodes of one type must have one fingerprint.
_MEMORY_STEP_BYTES = 2**28
# They decide the speed of a GEMM on a CPU.
_SPEED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def cpu_model(root: Path = ROOT) -> str | None:
    """Return the processor's name; None where the kernel does not report it."""
    return _cpuinfo(root, "model name") or _cpuinfo(root, "Model") or _cpuinfo(root, "CPU part")


def cpu_flags(root: Path = ROOT) -> str | None:
    """Return the instruction sets that matter to speed; None where unknown."""
    flags = _cpuinfo(root, "flags") or _cpuinfo(root, "Features")
    if flags is None:
        return None
    return " ".join(flag for flag in _SPEED_FLAGS if flag in flags.split()) or "none"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_numa_nodes(root: Path = ROOT) -> int | None:
    """Return the number of NUMA nodes; None where the kernel does not report it."""
    nodes = root / "sys/devices/system/node"
    return sum(1 for _ in nodes.glob("node[0-9]*")) or None


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may use, the control group's limit respected.

    Rounded down to 256 MiB, and never 0.
    """
    limit = min((_total_bytes(root), *_cgroup_limits(root)))
    return max(limit // _MEMORY_STEP_BYTES * _MEMORY_STEP_BYTES, 1)


def _total_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("MemTotal is not in /proc/meminfo")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield every limit from this process's control group up to the root, versions 1 and 2."""
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


def read_cuda_device(facts: Facts) -> None:
    """Record the first CUDA device's facts; nodes are assumed to have devices of one kind."""

    def properties(name: str) -> object:
        return getattr(torch.cuda.get_device_properties(0), name, None)

    facts.read("device", lambda: properties("name"))
    facts.read("memory_bytes", lambda: properties("total_memory"))
    facts.read("sm_count", lambda: properties("multi_processor_count"))
    facts.read("l2_bytes", lambda: properties("L2_cache_size"))
    facts.read("compute_capability", lambda: f"{properties('major')}.{properties('minor')}")
    facts.read("peer_access", _peer_access)


def read_cuda_software(facts: Facts, root: Path) -> None:
    """Record the versions of CUDA, cuDNN, NCCL and the driver, and what changes products' times.

    float32 products are several times as fast with TF32, and a throttled GPU's slower; whether
    either was so cannot be told from the times.
    """
    facts.read("cuda", lambda: torch.version.cuda)
    facts.read("cudnn", torch.backends.cudnn.version)
    facts.read("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
    facts.read("driver", lambda: _driver(root))
    facts.read("float32_products", torch.get_float32_matmul_precision)
    facts.read("throttling", _throttling)


def _throttling() -> str:
    """Return that a low clock would be seen.

    Raises:
        ModuleNotFoundError: it would not, without nvidia-ml-py.
    """
    torch.cuda.clock_rate()
    return "seen"


def _peer_access() -> str:
    """Return how many ordered pairs of this node's devices reach each other directly."""
    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    direct = sum(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    return f"{direct} of {len(pairs)} pairs"


def _driver(root: Path) -> str | None:
    """Return the driver's version, such as 570.86.15, from the kernel module's own file."""
    for file in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        path = root / file
        if path.exists():
            words = path.read_text().split()
            return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None
