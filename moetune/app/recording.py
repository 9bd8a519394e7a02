"""Record of a measurement on rank 0: its run in the store, and its progress."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from moetune.domain.cluster import Cluster
from moetune.domain.profile import Profile
from moetune.domain.records import RunStatus
from moetune.domain.samples import Point, Sample
from moetune.fit.quality import group_of

if TYPE_CHECKING:
    from moetune.measure.session import Estimates, News
    from moetune.store import SqlStore


class Progress:
    """Progress display of a measurement; this class shows nothing."""

    def start(self, groups: Mapping[str, int], seconds: float) -> None:
        """Show the number of points of each group and the estimated seconds for all."""

    def advance(self, sample: Sample, group: str, seconds_left: float) -> None:
        """Show another finished point."""

    def repeat(self, group: str, seconds_left: float) -> None:
        """Show that a finished point was measured again."""

    def finish(self, *, is_complete: bool) -> None:
        """Show the end of the measurement; it is incomplete if Ctrl-C ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What a run takes over from earlier runs.

    Args:
        run_id: id of an unfinished run to continue; None for a new run.
        samples: samples of the unfinished run, or those that a new run begins with.
        base: the current profile if it has another profile's tables or network; else None.
    """

    run_id: int | None = None
    samples: tuple[Sample, ...] = ()
    base: Profile | None = None

    @property
    def done(self) -> frozenset[Point]:
        """Points that were measured without an error and need no measurement."""
        return frozenset(sample.point for sample in self.samples if not sample.error)


def resume_state(store: "SqlStore", name: str, cluster: Cluster) -> ResumeState:
    """Return the last unfinished run of this name on this machine, else the current profile."""
    run_id = store.open_run(name=name, fingerprint=cluster.fingerprint)
    if run_id is not None:
        return ResumeState(run_id=run_id, samples=store.samples(run_id))
    current = store.profile(name)
    if current is None:
        return ResumeState()
    # What a measured profile took from another profile: all except its samples.
    base = replace(current, samples=()) if current.tables or current.network else None
    is_same = current.fingerprint == cluster.fingerprint
    return ResumeState(samples=current.samples if is_same else (), base=base)


_NOTHING = ResumeState()


class RecordedRun:
    """A run of the store, created when the points to measure are known, or with its first sample.

    As a context manager it sets the run's status: complete after `complete`, else partial.

    Args:
        cluster: the cluster as it was detected.
        progress: shows each sample and the estimated time left.
        begun: the run to continue, or the samples that a new run begins with.

    Attributes:
        cluster: the cluster, whose machine has the memory that the ranks could use.
    """

    def __init__(
        self,
        store: "SqlStore",
        *,
        name: str,
        cluster: Cluster,
        preset: str,
        progress: Progress,
        begun: ResumeState = _NOTHING,
    ) -> None:
        self.cluster = cluster
        self._store, self._name, self._preset, self._progress = store, name, preset, progress
        self._id, self._earlier = begun.run_id, begun.samples
        self._status: RunStatus = "partial"
        self._left: set[Point] = set()
        self._end = 0.0

    def receive(self, news: "News") -> None:
        """Take a rank's news: start the display with estimates, or store and show a sample."""
        if isinstance(news, Sample):
            self._measured(news)
        else:
            self._planned(news)

    def _planned(self, estimates: "Estimates") -> None:
        if estimates.usable_bytes is not None:
            machine = replace(self.cluster.machine, memory_bytes=estimates.usable_bytes)
            self.cluster = replace(self.cluster, machine=machine)
        self.begin()
        self._left = set(estimates.seconds)
        self._end = time.monotonic() + estimates.total_seconds
        groups = Counter(group_of(point, self.cluster.machine) for point in estimates.seconds)
        self._progress.start(groups, estimates.total_seconds)

    def _measured(self, sample: Sample) -> None:
        self._store.add_samples(self.begin(), [sample])
        group = group_of(sample.point, self.cluster.machine)
        seconds_left = max(self._end - time.monotonic(), 0.0)
        if sample.point in self._left:
            self._left.remove(sample.point)
            self._progress.advance(sample, group, seconds_left)
        else:
            self._progress.repeat(group, seconds_left)

    def begin(self) -> int:
        """Create the run if there is none yet, and return its id."""
        if self._id is None:
            self._id = self._store.start_run(
                name=self._name, cluster=self.cluster, preset=self._preset
            )
            self._store.add_samples(self._id, self._earlier)
        return self._id

    def samples(self) -> tuple[Sample, ...]:
        """Return all samples of the run, in order."""
        return self._store.samples(self.begin())

    def complete(self, profile: Profile) -> None:
        """Save the fit of the run's samples."""
        self._store.save_profile(profile, run_id=self.begin())
        self._status = "complete"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._id is not None:
            self._store.finish_run(self._id, status=self._status)
