"""What /proc and /sys say about the host: processor, cores, memory, NUMA nodes.

Every function takes the root of the file system, so that other machines' files can be read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Kernels reserve a little memory differently; nodes of one type must stay one type.
_MEMORY_STEP_BYTES = 2**28
# What decides the speed of a matrix product on a processor.
_SPEED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")


def cpu_model(root: Path = ROOT) -> str | None:
    """Return the processor's name, or None where the kernel does not tell."""
    return _cpuinfo(root, "model name") or _cpuinfo(root, "Model") or _cpuinfo(root, "CPU part")


def cpu_flags(root: Path = ROOT) -> str | None:
    """Return the instruction sets that matter to speed, or None where unknown."""
    flags = _cpuinfo(root, "flags") or _cpuinfo(root, "Features")
    if flags is None:
        return None
    return " ".join(flag for flag in _SPEED_FLAGS if flag in flags.split()) or "none"


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def num_numa_nodes(root: Path = ROOT) -> int | None:
    """Return the number of NUMA nodes, or None where the kernel does not tell."""
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
    """Yield every limit on the way from this process's control group up, versions 1 and 2."""
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
