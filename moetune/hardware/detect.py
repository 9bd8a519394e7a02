"""Detect this machine: its kind of device, their number and nodes, and its fingerprint."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from moetune.domain.cluster import HOST_MEMORY, Cluster, DeviceKind, Fingerprint, Machine
from moetune.domain.errors import InputError
from moetune.hardware.facts import (
    ROOT,
    UNKNOWN,
    Facts,
    cpu_flags,
    cpu_model,
    memory_bytes,
    num_cores,
    num_numa_nodes,
    read_cuda_device,
    read_cuda_software,
)

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

    CUDA is taken where torch can use it, else the CPU. On a CPU a rank's device is its share
    of the cores and of the memory.

    Args:
        ranks_per_node: ranks on one node; by default all of them on a CPU, and as many as
            there are devices here on CUDA.
        environment: the process's environment; what can change speed is recorded as software.
        threads_per_rank: threads that each rank computes with; default, as torch is set for one
            rank, and each rank's share of the cores for several.
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
    hardware = _hardware(kind, num_ranks, per_node, root)
    if threads_per_rank is None:
        shared = max(num_cores() // per_node, 1)
        threads_per_rank = torch.get_num_threads() if num_ranks == 1 else shared
    software = _software(kind, environment, threads_per_rank, root)
    memory = hardware.values["memory_bytes"]
    return Cluster(
        machine=Machine(
            kind=kind,
            device=hardware.values["device"],
            num_devices=num_ranks,
            devices_per_node=per_node,
            memory_bytes=1 if memory == UNKNOWN else int(memory),
        ),
        fingerprint=Fingerprint(hardware=hardware.values, software=software.values),
        notes=(*hardware.notes, *software.notes),
    )


def _hardware(kind: DeviceKind, num_ranks: int, per_node: int, root: Path) -> Facts:
    facts = Facts()
    facts.read("kind", lambda: kind)
    facts.read("num_devices", lambda: num_ranks)
    facts.read("devices_per_node", lambda: per_node)
    facts.read("cpu", lambda: cpu_model(root))
    facts.read("cpu_flags", lambda: cpu_flags(root))
    facts.read("cores", num_cores)
    facts.read("numa_nodes", lambda: num_numa_nodes(root))
    if kind == "cuda":
        read_cuda_device(facts)
        facts.read(HOST_MEMORY, lambda: memory_bytes(root))
    else:
        facts.read("device", lambda: cpu_model(root) or platform.machine() or None)
        facts.read("memory_bytes", lambda: max(memory_bytes(root) // per_node, 1))
    return facts


def _software(kind: DeviceKind, environment: Mapping[str, str], threads: int, root: Path) -> Facts:
    facts = Facts()
    facts.read("moetune", lambda: importlib.metadata.version("moetune"))
    facts.read("python", platform.python_version)
    facts.read("torch", lambda: torch.__version__)
    facts.read("kernel", lambda: os.uname().release)
    facts.read("backend", lambda: "nccl" if kind == "cuda" else "gloo")
    facts.read("threads_per_rank", lambda: threads)
    if kind == "cuda":
        read_cuda_software(facts, root)
    for name in sorted(filter(_is_allowed, environment)):
        facts.values[f"env.{name}"] = environment[name]
    return facts


def _is_allowed(name: str) -> bool:
    return name.startswith(_PREFIXES) and not any(part in name for part in _NOT_SPEED)
