"""Measurement of this machine: choose points, run the ranks, store every sample, fit a profile.

`moetune profile` calls `profile_machine` on rank 0 and `take_part` on the other ranks of a launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.domain.cluster import Cluster
from moetune.domain.profile import Profile
from moetune.domain.samples import Point, Sample
from moetune.fit.merged import check_base, merged
from moetune.fit.profile import fit_profile
from moetune.measure.points import PointChoice, choose_points, default_group_sizes
from moetune.workflows.profile_quality import summarize
from moetune.workflows.profile_request import (
    MeasurementSetting,
    ProfileOutcome,
    ProfileRequest,
    detect_cluster,
    profile_name,
)
from moetune.workflows.recording import (
    Progress,
    ResumeState,
    SampleRecorder,
    StoredRun,
    resumed,
)
from moetune.workflows.step_records import with_steps

if TYPE_CHECKING:
    from moetune.store import SqlStore


def estimate_profile(
    request: ProfileRequest, setting: MeasurementSetting, *, store: "SqlStore | None" = None
) -> Mapping[Point, float]:
    """Return the seconds that each point would take, estimated with a short probe.

    Args:
        store: omits the points that an earlier run there has measured; None for all points.

    Raises:
        InputError: the request does not fit this machine.
        CollectiveError: a rank died.
    """
    cluster = detect_cluster(request, setting)
    begun = resumed(store, profile_name(request, cluster), cluster) if store else ResumeState()
    recorder = SampleRecorder(machine=cluster.machine, progress=Progress())
    _measure(request, setting, cluster, begun.done, recorder, plan_only=True)
    return recorder.seconds


def measure_profile(
    request: ProfileRequest, setting: MeasurementSetting, *, progress: Progress | None = None
) -> Profile:
    """Measure and fit without a database, alone or as rank 0 of a launch.

    Raises:
        InputError: the request does not fit this machine.
        CollectiveError: a rank died.
        ProfileError: nothing could be measured.
    """
    cluster = detect_cluster(request, setting)
    shown = progress or Progress()
    recorder = SampleRecorder(machine=cluster.machine, progress=shown)
    _measure(request, setting, cluster, frozenset(), recorder)
    name = profile_name(request, cluster)
    found = replace(cluster, machine=recorder.machine)
    profile = _fit(name, found, recorder.samples, request.seed)
    shown.finish(summarize(profile))
    return profile


def take_part(request: ProfileRequest, setting: MeasurementSetting) -> None:
    """Measure as a rank above 0 of a launch; rank 0 chooses the points and stores the samples.

    Raises:
        CollectiveError: a rank died.
    """
    from moetune.measure.session import Assignment
    from moetune.workflows.measuring import measure_on_ranks

    assignment = Assignment(needed=(), preset=request.preset)
    measure_on_ranks(assignment, setting, num_ranks=request.num_ranks)


def profile_machine(
    request: ProfileRequest,
    setting: MeasurementSetting,
    *,
    store: "SqlStore",
    progress: Progress,
    resume: bool = False,
) -> ProfileOutcome:
    """Measure, store every sample as soon as it is done, and fit.

    Ctrl-C and a dead rank leave the run "partial", a killed process leaves it "running"; both can
    be resumed.

    Args:
        resume: measure only the points that the last unfinished run of this name lacks, on this
            machine with the same software; without such a run, those that the current profile
            lacks.

    Raises:
        InputError: the request does not fit this machine.
        CollectiveError: a rank died.
        ProfileError: nothing could be measured.
        KeyboardInterrupt: Ctrl-C.
    """
    cluster = detect_cluster(request, setting)
    name = profile_name(request, cluster)
    begun = resumed(store, name, cluster) if resume else ResumeState()
    base = request.base or begun.base
    if base is not None:
        check_base(base, cluster.machine)
    run = StoredRun(store, name=name, cluster=cluster, preset=request.preset, begun=begun)
    recorder = SampleRecorder(
        machine=cluster.machine, store=run.append, progress=progress, begin=run.begin
    )
    with run:
        _measure(request, setting, cluster, begun.done, recorder)
        found = replace(cluster, machine=recorder.machine)
        profile = _fit(name, found, run.samples(), request.seed)
        if base is not None:
            profile = merged(profile, base)
        run.complete(profile)
    groups = summarize(profile)
    progress.finish(groups)
    return ProfileOutcome(
        profile=profile,
        run_id=run.begin(),
        location=store.location,
        num_reused=len(begun.known),
        groups=groups,
    )


def _measure(
    request: ProfileRequest,
    setting: MeasurementSetting,
    cluster: Cluster,
    done: frozenset[Point],
    recorder: SampleRecorder,
    *,
    plan_only: bool = False,
) -> None:
    """Measure the points that are not done."""
    from moetune.measure.session import Assignment
    from moetune.workflows.measuring import measure_on_ranks

    left = _chosen_points(request, cluster).without(done)
    assignment = Assignment(
        needed=left.needed,
        others=left.others,
        preset=request.preset,
        ranks_per_node=cluster.machine.devices_per_node,
        budget_seconds=request.budget_seconds,
        plan_only=plan_only,
        seed=request.seed,
    )
    measure_on_ranks(assignment, setting, num_ranks=request.num_ranks, on_news=recorder.receive)


def _chosen_points(request: ProfileRequest, cluster: Cluster) -> PointChoice:
    from moetune.measure.estimate import default_dtypes

    group_sizes = request.group_sizes or default_group_sizes(cluster.machine.num_devices)
    dtypes = request.dtypes or default_dtypes(cluster.machine.kind, request.preset)
    return choose_points(
        cluster=cluster,
        dtypes=dtypes,
        group_sizes=group_sizes,
        layers=request.layers,
        models=request.models,
        preset=request.preset,
        max_tokens=request.max_tokens,
    )


def _fit(name: str, cluster: Cluster, samples: Sequence[Sample], seed: int) -> Profile:
    fitted = fit_profile(
        name=name,
        machine=cluster.machine,
        fingerprint=cluster.fingerprint,
        samples=samples,
        seed=seed,
    )
    return with_steps(fitted)
