"""Measurement of this machine: choose points, run ranks, store every sample, fit a profile."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from moetune.app.profile_request import ProfileOutcome, ProfileRequest, detect_cluster, profile_name
from moetune.app.recording import Progress, RecordedRun, ResumeState, resume_state
from moetune.domain.cluster import Cluster
from moetune.domain.errors import CollectiveError, ProfileError
from moetune.domain.profile import Profile
from moetune.domain.samples import Point, Sample, StepPoint, StepRecord, undisturbed
from moetune.fit.based import check_base, merged
from moetune.fit.costs import costs_of
from moetune.fit.profile import fit_profile
from moetune.measure.points import PointScope, default_group_sizes
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time

if TYPE_CHECKING:
    from moetune.measure.session import Assignment, News
    from moetune.store import SqlStore


def take_part(request: ProfileRequest) -> None:
    """Measure as a rank above 0 of a launch, for rank 0; raise CollectiveError if a rank dies."""
    from moetune.measure.session import Assignment

    measure_on_ranks(Assignment(needed=(), preset=request.preset), request)


def profile_machine(
    request: ProfileRequest, *, store: "SqlStore", progress: Progress, resume: bool
) -> ProfileOutcome:
    """Measure, store every sample as soon as it is done, and fit.

    Ctrl-C and a dead rank leave the run "partial", and a killed process leaves it "running". Both
    can be resumed.

    Args:
        resume: measure only the points that are missing in the last unfinished run of this name,
            on this machine with the same software. Without such a run, measure the points that are
            missing in the current profile.

    Raises:
        InputError: the request does not fit this machine.
        CollectiveError: a rank died.
        ProfileError: nothing could be measured.
        KeyboardInterrupt: Ctrl-C.
    """
    cluster = detect_cluster(request)
    name = profile_name(request, cluster)
    begun = resume_state(store, name, cluster) if resume else ResumeState()
    base = request.base or begun.base
    if base is not None:
        check_base(base, cluster.machine)
    run = RecordedRun(
        store, name=name, cluster=cluster, preset=request.preset, progress=progress, begun=begun
    )
    with run:
        _measure(request, cluster, begun.done, run.receive)
        fitted = fit_profile(
            name=name, machine=run.cluster.machine, fingerprint=cluster.fingerprint,
            samples=run.samples(),
        )  # fmt: skip
        profile = with_steps(fitted)
        if base is not None:
            profile = merged(profile, base)
        run.complete(profile)
    progress.finish(is_complete=True)
    return ProfileOutcome(
        profile=profile, run_id=run.begin(), location=store.location, num_reused=len(begun.samples)
    )


def _measure(
    request: ProfileRequest,
    cluster: Cluster,
    done: frozenset[Point],
    on_news: "Callable[[News], None]",
) -> None:
    import torch

    from moetune.measure.estimate import default_dtypes
    from moetune.measure.kernels import other_kernels
    from moetune.measure.session import Assignment

    machine = cluster.machine
    scope = PointScope(
        machine=machine,
        dtypes=request.dtypes or default_dtypes(machine.kind, request.preset),
        group_sizes=request.group_sizes or default_group_sizes(machine.num_devices),
        layers=request.layers,
        models=request.models,
        preset=request.preset,
        max_tokens=request.max_tokens,
        kernels_of=partial(other_kernels, device=torch.device(machine.kind)),
    )
    left = scope.points().without(done)
    assignment = Assignment(
        needed=left.needed,
        optional=left.optional,
        preset=request.preset,
        ranks_per_node=machine.devices_per_node,
        budget_seconds=request.budget_seconds,
    )
    measure_on_ranks(assignment, request, on_news)


def measure_on_ranks(
    assignment: "Assignment",
    request: ProfileRequest,
    on_news: "Callable[[News], object]" = lambda _: None,
) -> None:
    """Run the session on ranks of this machine or of a launch; errors: see `run_on_ranks`."""
    from moetune.app.launch import run_on_ranks

    try:
        run_on_ranks(
            _run_session,
            assignment,
            num_ranks=request.num_ranks,
            launch=request.launch,
            environ=request.environment,
            on_message=on_news,
            oversubscribe=request.oversubscribe,
        )
    except CollectiveError as error:
        raise CollectiveError(
            str(error),
            "run again with --resume: it omits the points that are already in the database",
        ) from error


def _run_session(assignment: "Assignment", tell: "Callable[[News], object]") -> None:
    from moetune.app.launch import rank_device
    from moetune.measure.device import open_device
    from moetune.measure.ranks import MeasuringRanks
    from moetune.measure.session import run_session

    device = open_device(rank_device().index or 0)
    run_session(assignment, device=device, ranks=MeasuringRanks(), on_news=tell)


def with_steps(profile: Profile) -> Profile:
    """Return the profile with a record of every whole step among its samples.

    A step takes longer than its operations: ranks wait for each other, caches are cold, and the
    host takes time. No curve of a profile has this; `fit.step_errors` learns it from the records.
    Steps without measured operations, as in a very short session, have no record. Nor have steps
    that other programs disturbed at every visit.
    """
    return replace(profile, steps=tuple(_steps(replace(profile, steps=()))))


def _steps(profile: Profile) -> Iterator[StepRecord]:
    costs = costs_of(profile)
    for point, visits in _clean_visits(profile):
        load = point.workload
        try:
            predicted = step_time(
                costs=layer_costs(workload=load, costs=costs), tokens=load.tokens_per_rank,
                degree=point.degree,
            )  # fmt: skip
        except ProfileError:
            continue
        yield StepRecord(
            workload=load,
            degree=point.degree,
            chunks_seconds=predicted.forward.seconds + predicted.backward.seconds,
            overhead_seconds=predicted.overhead.seconds,
            measured_seconds=statistics.median(
                seconds for visit in undisturbed(visits) for seconds in visit.seconds
            ),
        )


def _clean_visits(profile: Profile) -> Iterator[tuple[StepPoint, list[Sample]]]:
    """Yield each whole step with its visits that have no marks."""
    visits: dict[StepPoint, list[Sample]] = {}
    for sample in profile.samples:
        if isinstance(sample.point, StepPoint) and sample.seconds and not sample.marks:
            visits.setdefault(sample.point, []).append(sample)
    yield from sorted(visits.items())
