"""What makes a measured profile stale: software that changed since, on the same processor."""

from collections.abc import Mapping
from pathlib import Path

from moetune.domain.profile import Profile

SPEED_OF_SOFTWARE = ("torch", "backend", "nccl", "cuda", "cudnn", "driver", "threads_per_rank")
"""Software facts that change how fast operations are."""


def changes(profile: Profile, software: Mapping[str, str]) -> tuple[str, ...]:
    """Return changed facts, "torch 2.12 there, 2.13 here", of the software that is known here."""
    there = profile.fingerprint.software
    return tuple(
        f"{name} {there.get(name, '—')} there, {software[name]} here"
        for name in SPEED_OF_SOFTWARE
        if name in software and there and there.get(name) != software[name]
    )


def software_here() -> dict[str, str]:
    """Return the software facts that are known without loading torch, which takes a second."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"torch": version("torch")}
    except PackageNotFoundError:
        return {}


def is_of_this_processor(profile: Profile, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether a profile was measured on a host with this one's processor.

    A laptop that plans for a cluster has other software, too, and nothing is stale there.
    """
    processor = profile.fingerprint.hardware.get("cpu", "")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(processor and processor == line.partition(":")[2].strip() for line in lines)


def stale_note(profile: Profile) -> str:
    """Return what made a profile of this processor stale and the command to renew it, else ""."""
    if profile.provenance != "measured" or not is_of_this_processor(profile):
        return ""
    changed = changes(profile, software_here())
    if not changed:
        return ""
    return (
        f"profile {profile.name!r} is stale, the software changed: {', '.join(changed)}; "
        f"measure it again: `moetune profile --name {profile.name}`"
    )
