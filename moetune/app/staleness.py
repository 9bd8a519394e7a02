"""Stale profiles: measured on this processor with software that has changed since."""

from pathlib import Path

from moetune.domain.profile import Profile
from moetune.report.words import stale_words


def software_here() -> dict[str, str]:
    """Return software facts without loading torch, which would take a second."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"torch": version("torch")}
    except PackageNotFoundError:
        return {}


def is_of_this_processor(profile: Profile, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether a profile was measured on a host with the same processor as this host.

    A laptop that plans for a cluster also has other software, but no profile is stale there.
    """
    processor = profile.fingerprint.hardware.get("cpu", "")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    return any(processor and processor == line.partition(":")[2].strip() for line in lines)


def stale_note(profile: Profile) -> str:
    """Return why a profile of this processor is stale, and the command to renew it; else ""."""
    if profile.provenance != "measured" or not is_of_this_processor(profile):
        return ""
    changed = profile.fingerprint.software_changes(software_here())
    return stale_words(profile.name, changed) if changed else ""
