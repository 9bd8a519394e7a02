"""What torch and the driver say about the CUDA devices."""

from pathlib import Path

import torch

from moetune.hardware.facts import Facts


def read_device(facts: Facts) -> None:
    """Record the first device's facts; nodes are taken to have devices of one kind."""

    def properties(name: str) -> object:
        return getattr(torch.cuda.get_device_properties(0), name, None)

    facts.read("device", lambda: properties("name"))
    facts.read("memory_bytes", lambda: properties("total_memory"))
    facts.read("sm_count", lambda: properties("multi_processor_count"))
    facts.read("l2_bytes", lambda: properties("L2_cache_size"))
    facts.read("compute_capability", lambda: f"{properties('major')}.{properties('minor')}")
    facts.read("peer_access", _peer_access)


def read_software(facts: Facts, root: Path) -> None:
    """Record the versions of CUDA, cuDNN, NCCL and the driver."""
    facts.read("cuda", lambda: torch.version.cuda)
    facts.read("cudnn", torch.backends.cudnn.version)
    facts.read("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
    facts.read("driver", lambda: _driver(root))


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
