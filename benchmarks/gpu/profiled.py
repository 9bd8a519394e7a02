"""The part that profiles: GEMM, row operations, copies, interference, and the loopback."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.scale import Scale
from moetune import config
from moetune.app.files import load_profile_file, profile_to_toml, write_text
from moetune.app.profile import profile_machine
from moetune.app.profile_request import ProfileRequest
from moetune.app.recording import Progress
from moetune.domain.profile import Profile
from moetune.domain.samples import CopyPoint, GemmPoint, InterferencePoint, Sample

if TYPE_CHECKING:
    from moetune.store import SqlStore

FILE = "profile.toml"


def run_profile(scale: Scale, folder: Path) -> None:
    """Measure within the budget, write the profile, and a row for each kind of figure."""
    request = ProfileRequest(
        name=folder.name,
        num_ranks=scale.num_ranks,
        preset="full" if scale.device == "cuda" else "quick",
        dtypes=scale.dtypes,
        layers=(
            *(scale.workload(model, 1, scale.num_ranks).layer for model in scale.models),
            *scale.several_experts,
        ),
        max_tokens=scale.tokens[-1],
        budget_seconds=scale.budget_seconds,
        environment=config.environment(),
    )
    progress = _Visits(Rows(folder, "visits"))
    store = cast("SqlStore", _SamplesInMemory())
    profile = profile_machine(request, store=store, progress=progress, resume=False).profile
    write_text(folder / FILE, profile_to_toml(profile))
    rows = Rows(folder, "profile")
    for row in profile_rows(profile):
        rows.add(**row)


class _SamplesInMemory:
    """What a measurement asks of a store: the GPU's machine has no database."""

    location = "memory"

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def start_run(self, **_: object) -> int:
        """Begin the only run."""
        return 1

    def add_samples(self, _: int, samples: Sequence[Sample]) -> None:
        """Keep samples in order."""
        self._samples += samples

    def samples(self, _: int) -> tuple[Sample, ...]:
        """Return the run's samples."""
        return tuple(self._samples)

    def save_profile(self, *_: object, **__: object) -> None:
        """Do nothing: the caller writes the profile to a file."""

    def finish_run(self, *_: object, **__: object) -> None:
        """Do nothing: nothing is resumed."""


class _Visits(Progress):
    """Writes when each visit ended: a part that is ended too late tells where its time went."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._start = rows, time.perf_counter()
        rows.begin()

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Write what is planned."""
        self._tell(points=sum(groups.values()), estimated_seconds=seconds)

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:  # noqa: ARG002 - of the display
        """Write a point's first visit."""
        self._tell(point=repr(sample.point), marks=sample.marks, error=sample.error)

    def repeat(self, group: str, seconds_left: float) -> None:  # noqa: ARG002 - of the display
        """Write a point's next visit."""
        self._tell(group=group)

    def _tell(self, **row: object) -> None:
        self._rows.add(at_seconds=time.perf_counter() - self._start, **row)


def profile_rows(profile: Profile) -> Iterator[Row]:
    """Yield the best products, copies, and slowdowns."""
    for dtype in sorted(_dtypes(profile)):
        peak = peak_macs_per_second(profile, dtype)
        yield {"kind": "gemm", "dtype": dtype, "macs_per_second": peak}
    for sample in profile.samples:
        point = sample.point
        if isinstance(point, CopyPoint) and not sample.error:
            yield {
                "kind": "copy", "direction": point.direction, "pinned": point.pinned,
                "both_ways": point.both_ways, "num_bytes": point.num_bytes,
                "seconds": sample.median_seconds,
            }  # fmt: skip
    if _has_interference(profile):
        yield {"kind": "interference", **asdict(profile.interference)}
    for sample in profile.samples:
        if sample.error:
            yield {"kind": "failure", "point": repr(sample.point), "error": sample.error}


def _has_interference(profile: Profile) -> bool:
    """Return whether each class that was measured beside others was measured alone, too."""
    points = [item.point for item in profile.samples if isinstance(item.point, InterferencePoint)]
    overlapped = {point.victim for point in points if point.others}
    return bool(overlapped) and overlapped <= {point.victim for point in points if not point.others}


def _dtypes(profile: Profile) -> set[str]:
    return {
        sample.point.dtype
        for sample in profile.samples
        if isinstance(sample.point, GemmPoint) and not sample.error
    }


def peak_macs_per_second(profile: Profile, dtype: str) -> float:
    """Return the rate of the best product."""
    return max(
        sample.point.macs / sample.median_seconds
        for sample in profile.samples
        if isinstance(sample.point, GemmPoint) and sample.point.dtype == dtype and not sample.error
    )


def load(folder: Path) -> Profile | None:
    """Return the profile that was written; None if its part failed."""
    path = folder / FILE
    return load_profile_file(path) if path.exists() else None
