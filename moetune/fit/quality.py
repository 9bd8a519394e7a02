"""Quality of a measured profile, by operation and as a whole."""

import statistics
from collections.abc import Sequence

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


def quality_of(profile: Profile) -> ProfileQuality | None:
    """Return the quality of the worst group, and the suspect groups; None without any quality.

    A group's quality is the worst of its fits, or that of its median sample if it has no fit.
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
    """Return the name of the group in which a point is shown, such as "GEMM"."""
    if isinstance(point, CollectivePoint):
        return _collective_group(point.op, point.group, machine)
    return _NAMES.get(point.kind, point.kind)


def _collective_group(op: CollectiveOp, group: Group, machine: Machine) -> str:
    """Return the collective's name; on several nodes also the placement of its ranks."""
    if machine.num_devices <= machine.devices_per_node:
        return op
    return f"{op}, {placement_name(group, machine)}"


def _middle(samples: Sequence[Sample]) -> int:
    """Return the quality index of the median sample; the worst index if no sample was timed."""
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
