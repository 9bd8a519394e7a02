"""New software makes a profile stale: what changed, and a check of about ten seconds.

The check measures a few representative points of the profile again (`check_points`), and compares
them (`judge_check`): within 5 % the profile still describes the machine, else it is measured anew.
"""

import importlib.metadata
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.samples import Point, Sample
from moetune.report.section import percent, percents

if TYPE_CHECKING:
    from moetune.app.profile_request import MeasurementSetting
    from moetune.measure.session import News
    from moetune.store import SqlStore

Verdict = Literal["keep", "measure", "unsure"]
SPEED_OF_SOFTWARE = ("torch", "backend", "nccl", "cuda", "cudnn", "driver", "threads_per_rank")
"""Software facts that change how fast operations are."""
AGREEMENT = 0.05
"""Largest median difference at which a profile is kept."""
MOST_POINTS = 12
"""A check measures so many points: at most a second each, groups of ranks included."""
LEAST_POINTS = 3
_OF_ONE_KIND = 0.10
_BUDGET_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPoint:
    """One point, as in the profile and as now; medians of the raw times."""

    point: Point
    profiled_seconds: float
    seconds: float

    @property
    def ratio(self) -> float:
        """Now over then."""
        return self.seconds / self.profiled_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of a check.

    Args:
        verdict: "unsure" where too few points could be compared, or they vary too much.
    """

    verdict: Verdict
    points: tuple[CheckedPoint, ...]

    @property
    def median_difference(self) -> float:
        """Median of |now / then − 1|; 0 without a point."""
        return statistics.median([abs(point.ratio - 1) for point in self.points] or [0.0])

    def words(self, profile: Profile) -> str:
        """Return the verdict in a sentence, and what to do."""
        count = (
            f"{len(self.points)} points differ by {percent(self.median_difference)} in the median"
        )
        again = f"measure it again: `moetune profile --name {profile.name}`"
        match self.verdict:
            case "keep":
                return f"{count}: profile {profile.name!r} still describes this machine"
            case "measure":
                worst = max(self.points, key=lambda point: abs(point.ratio - 1))
                (most,) = percents(worst.ratio - 1, sign=True)
                return (
                    f"{count}, {worst.point.kind} by up to {most}: profile "
                    f"{profile.name!r} is out of date; {again}"
                )
            case "unsure":
                return f"{count}, too noisy or too few to tell; let nothing else run, or {again}"


def changes(profile: Profile, software: Mapping[str, str]) -> tuple[str, ...]:
    """Return the software facts that changed, as "torch 2.12 there, 2.13 here".

    Args:
        software: facts of this machine, as in `Fingerprint`; those that it lacks altogether are
            not compared, so that some of them suffice.
    """
    there = profile.fingerprint.software
    return tuple(
        f"{name} {there.get(name, '—')} there, {software[name]} here"
        for name in SPEED_OF_SOFTWARE
        if name in software and there and there.get(name) != software[name]
    )


def software_here() -> dict[str, str]:
    """Return the software facts that are known without loading torch, which takes a second."""
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
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
    """Return what made a profile of this processor stale, and the command that checks it.

    Returns:
        "" where nothing did.
    """
    if profile.provenance != "measured" or not is_of_this_processor(profile):
        return ""
    changed = changes(profile, software_here())
    if not changed:
        return ""
    return (
        f"profile {profile.name!r} is stale, the software changed: {', '.join(changed)}; "
        f"check it in ten seconds: `moetune profiles check {profile.name}`"
    )


def check_points(profile: Profile) -> tuple[Point, ...]:
    """Return the points that a check measures: of each operation the middle and the largest size.

    One of each kind comes before a second of any, and collectives, which a library's version
    changes most, before GEMMs, operations on rows, attention and copies.
    """
    by_kind: dict[str, dict[object, list[Point]]] = {}
    for sample in profile.samples:
        if sample.seconds and not sample.error and sample.point.kind in _KINDS:
            operations = by_kind.setdefault(sample.point.kind, {})
            operations.setdefault(_operation(sample.point), []).append(sample.point)
    queues = [_queue(by_kind[kind]) for kind in _KINDS if kind in by_kind]
    in_turns = (point for turn in zip_longest(*queues) for point in turn if point is not None)
    return tuple(islice(in_turns, MOST_POINTS))


def judge_check(profile: Profile, samples: Sequence[Sample]) -> Check:
    """Return whether the points measured now are those of the profile.

    Args:
        samples: of `check_points`, measured now; those with an error are left out.
    """
    then, now = _by_point(profile.samples), _by_point(samples)
    points = tuple(
        CheckedPoint(
            point=point,
            profiled_seconds=statistics.median(then[point]),
            seconds=statistics.median(seconds),
        )
        for point, seconds in now.items()
        if point in then
    )
    check = Check(verdict="unsure", points=points)
    difference = check.median_difference
    if len(points) < min(LEAST_POINTS, len(check_points(profile))):
        return check
    by_kind: dict[str, list[float]] = {}
    for checked in points:
        by_kind.setdefault(checked.point.kind, []).append(abs(checked.ratio - 1))
    worst = max(map(statistics.median, by_kind.values()))
    if difference <= AGREEMENT and worst <= _OF_ONE_KIND:
        return replace(check, verdict="keep")
    noise = statistics.median(_spread(now[checked.point]) for checked in points)
    return check if max(difference, worst) <= noise else replace(check, verdict="measure")


def check_profile(
    profile: Profile, setting: "MeasurementSetting", *, store: "SqlStore | None"
) -> Check | None:
    """Measure a few of the profile's points again, on as many ranks as it has.

    Where they agree, the profile is stored again as one of the software that is installed now.

    Args:
        store: None on the ranks above 0 of a launch.

    Returns:
        None on the ranks above 0 of a launch.

    Raises:
        InputError: a published profile, or one of another machine or number of ranks.
        CollectiveError: a rank died.
    """
    from moetune.app.profile import measure_on_ranks, take_part
    from moetune.app.profile_request import ProfileRequest, detect_cluster
    from moetune.measure.session import Assignment

    request = ProfileRequest(name=profile.name, num_ranks=profile.machine.num_devices)
    if store is None:
        take_part(request, setting)
        return None
    cluster = detect_cluster(request, setting)
    if cluster.fingerprint.hardware != profile.fingerprint.hardware:
        raise InputError(
            f"profile {profile.name!r} is not of this machine with "
            f"{cluster.machine.num_devices} ranks",
            "check it where it was measured, or measure this one:  moetune profile",
        )
    samples: list[Sample] = []

    def keep(news: "News") -> None:
        if isinstance(news, Sample):
            samples.append(news)

    measure_on_ranks(
        Assignment(
            needed=check_points(profile),
            preset="quick",
            ranks_per_node=profile.machine.devices_per_node,
            budget_seconds=_BUDGET_SECONDS,
        ),
        replace(setting, oversubscribe=True),  # as when it was measured
        num_ranks=request.num_ranks,
        on_news=keep,
    )
    check = judge_check(profile, samples)
    if check.verdict == "keep":
        software = cluster.fingerprint.software
        fingerprint = replace(profile.fingerprint, software=software)
        store.save_profile(replace(profile, fingerprint=fingerprint))
    return check


def _by_point(samples: Sequence[Sample]) -> dict[Point, tuple[float, ...]]:
    """Return the raw times of each point."""
    times: dict[Point, tuple[float, ...]] = {}
    for sample in samples:
        if sample.seconds and not sample.error:
            times[sample.point] = times.get(sample.point, ()) + sample.seconds
    return times


def _spread(seconds: Sequence[float]) -> float:
    """Return the median deviation from the median, relative."""
    middle = statistics.median(seconds)
    return statistics.median(abs(time / middle - 1) for time in seconds)


def _queue(families: Mapping[object, Sequence[Point]]) -> list[Point]:
    """Return the middle point of each operation, then the largest of each."""
    ordered = [sorted(set(points), key=_size) for points in families.values()]
    middle = [points[len(points) // 2] for points in ordered]
    return list(dict.fromkeys([*middle, *(points[-1] for points in ordered)]))


_KINDS = ("collective", "gemm", "rows", "attention", "copy")
_OPERATION = ("op", "group", "dtype", "product", "backward", "direction", "pinned")
"""Fields of points that say which operation they are of; of collectives also the queue."""
_SIZES = ("macs", "elements", "num_bytes")


def _operation(point: Point) -> object:
    fields = (getattr(point, name, None) for name in _OPERATION)
    return (*fields, getattr(point, "in_flight", 1) > 1)


def _size(point: Point) -> float:
    return next(float(getattr(point, name)) for name in _SIZES if hasattr(point, name))
