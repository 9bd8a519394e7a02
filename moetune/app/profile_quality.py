"""Quality of a measured profile: of its operations, of the whole, and what makes it stale."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from moetune.domain.cluster import Group, Machine, placement_name
from moetune.domain.profile import FitError, Profile, ProfileQuality, SuspectGroup
from moetune.domain.samples import CollectiveOp, CollectivePoint, Point, Quality, Sample

_NAMES = {
    "gemm": "GEMM",
    "rows": "memory-bound operations",
    "copy": "copies",
    "step": "steps of the layer",
}
_QUALITIES: tuple[Quality, ...] = ("good", "usable", "suspect")
SPEED_OF_SOFTWARE = ("torch", "backend", "nccl", "cuda", "cudnn", "driver", "threads_per_rank")
"""Software facts that change how fast operations are."""


def quality_of(profile: Profile) -> ProfileQuality | None:
    """Return the quality of the worst group, and which are suspect; None where none is known.

    A group's is the worst of its fits'; without a fit, that of its median sample.
    """
    by_group: dict[str, list[Sample]] = {}
    for sample in profile.samples:
        by_group.setdefault(group_of(sample.point, profile.machine), []).append(sample)
    errors = _fit_errors(profile)
    labels = {
        group: max(_QUALITIES.index(error.quality) for error in errors[group])
        if group in errors
        else _middle(by_group[group])
        for group in dict.fromkeys((*by_group, *errors))
    }
    if not labels:
        return None
    worst = len(_QUALITIES) - 1
    suspect = (
        SuspectGroup(
            group=group,
            median_error=max((error.median for error in errors.get(group, ())), default=None),
            p95_error=max((error.p95 for error in errors.get(group, ())), default=None),
        )
        for group, label in labels.items()
        if label == worst
    )
    return ProfileQuality(label=_QUALITIES[max(labels.values())], suspect=tuple(suspect))


def group_of(point: Point, machine: Machine) -> str:
    """Return the group in which a point is shown, such as "GEMM"."""
    if isinstance(point, CollectivePoint):
        return _collective_group(point.op, point.group, machine)
    return _NAMES.get(point.kind, point.kind)


def not_measured(sample: Sample, machine: Machine) -> str:
    """Return what a failed sample is of, and why it failed: "one point of copies (…)"."""
    return f"one point of {group_of(sample.point, machine)} ({sample.error})"


def _collective_group(op: CollectiveOp, group: Group, machine: Machine) -> str:
    """Return the collective's name; with several nodes also the placement of its ranks."""
    if machine.num_devices <= machine.devices_per_node:
        return op
    return f"{op}, {placement_name(group, machine)}"


def _middle(samples: Sequence[Sample]) -> int:
    """Return the index of the quality of the median sample; the worst where none was timed."""
    timed = [_QUALITIES.index(sample.quality) for sample in samples if not sample.error]
    return round(statistics.median(timed)) if timed else len(_QUALITIES) - 1


def _fit_errors(profile: Profile) -> dict[str, list[FitError]]:
    named = [("GEMM", line.error) for line in profile.gemm]
    for line in profile.collective:
        group = line.group_size, line.num_nodes
        named.append((_collective_group(line.op, group, profile.machine), line.error))
    named += [("copies", line.error) for line in profile.copy]
    errors: dict[str, list[FitError]] = {}
    for name, error in named:
        if error is not None:
            errors.setdefault(name, []).append(error)
    return errors


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
