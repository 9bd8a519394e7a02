"""Quality of a measured profile: of each group of its operations, and of the whole."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One group of points after the fit.

    Args:
        quality: the worst of its fits'; without a fit, that of its median sample.
        median_error: median leave-one-out error of its fits, relative; None without a fit.
    """

    group: str
    num_points: int
    num_failed: int
    quality: Quality
    median_error: float | None


def quality_of(profile: Profile) -> ProfileQuality | None:
    """Return the quality of the worst group, and which are suspect; None where none is known."""
    groups, errors = summarize(profile), _fit_errors(profile)
    if not groups:
        return None
    return ProfileQuality(
        label=_QUALITIES[max(_QUALITIES.index(group.quality) for group in groups)],
        suspect=tuple(
            _suspect(group.group, errors.get(group.group, []))
            for group in groups
            if group.quality == _QUALITIES[-1]
        ),
    )


def _suspect(group: str, errors: Sequence[FitError]) -> SuspectGroup:
    """Return the group with the errors of its worst fit."""
    if not errors:
        return SuspectGroup(group=group)
    return SuspectGroup(
        group=group,
        median_error=max(error.median for error in errors),
        p95_error=max(error.p95 for error in errors),
    )


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


def summarize(profile: Profile) -> tuple[GroupSummary, ...]:
    """Return the quality of each group of a profile with samples or errors, in measured order."""
    by_group: dict[str, list[Sample]] = {}
    for sample in profile.samples:
        by_group.setdefault(group_of(sample.point, profile.machine), []).append(sample)
    errors = _fit_errors(profile)
    return tuple(
        _summary(group, by_group.get(group, []), errors.get(group, []))
        for group in dict.fromkeys((*by_group, *errors))
    )


def _summary(group: str, samples: Sequence[Sample], errors: Sequence[FitError]) -> GroupSummary:
    labels = [_QUALITIES.index(error.quality) for error in errors]
    return GroupSummary(
        group=group,
        num_points=len({sample.point for sample in samples}),
        num_failed=sum(bool(sample.error) for sample in samples),
        quality=_QUALITIES[max(labels)] if labels else _middle(samples),
        median_error=statistics.median(error.median for error in errors) if errors else None,
    )


def _middle(samples: Sequence[Sample]) -> Quality:
    """Return the quality of the median sample; the worst where none was timed."""
    timed = [_QUALITIES.index(sample.quality) for sample in samples if not sample.error]
    return _QUALITIES[round(statistics.median(timed)) if timed else -1]


def _fit_errors(profile: Profile) -> dict[str, list[FitError]]:
    named = [
        *(("GEMM", line.error) for line in profile.gemm),
        *(
            (
                _collective_group(line.op, (line.group_size, line.num_nodes), profile.machine),
                line.error,
            )
            for line in profile.collective
        ),
        *(("copies", line.error) for line in profile.copy),
    ]
    errors: dict[str, list[FitError]] = {}
    for name, error in named:
        if error is not None:
            errors.setdefault(name, []).append(error)
    return errors
