"""Whole steps that a session measured, beside what the operations that it measured say of them.

What a step takes longer than its operations is on no curve of a profile: waiting for other ranks,
cold caches, the host's own time. `fit.step_errors` learns it from the records.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.errors import ProfileError
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample, StepPoint, StepRecord, undisturbed
from moetune.fit.costs import costs_of
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time


def with_steps(profile: Profile) -> Profile:
    """Return the profile with a record of every whole step among its samples.

    Steps whose operations were not measured, as in a very short session, have none; nor have those
    that other programs disturbed at every visit.
    """
    return replace(profile, steps=tuple(_steps(replace(profile, steps=()))))


def _steps(profile: Profile) -> Iterator[StepRecord]:
    costs = costs_of(profile)
    for point, visits in _clean_visits(profile):
        load = point.workload
        try:
            predicted = step_time(
                costs=layer_costs(workload=load, costs=costs),
                tokens=load.tokens_per_rank,
                forward_degree=point.degree,
                backward_degree=point.degree,
            )
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
