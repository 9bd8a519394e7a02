"""Whole steps that a session measured, beside what the operations that it measured say of them.

What a step takes longer than its operations is on no curve of a profile: waiting for other ranks,
cold caches, the host's own time. `fit.step_errors` learns it from the records of layers, and
`solve.model.in_turns` from those of blocks in turns.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from moetune.domain.errors import ProfileError
from moetune.domain.profile import Profile
from moetune.domain.samples import UNSTABLE, Sample, StepPoint, TurnsPoint, undisturbed
from moetune.domain.step_errors import StepRecord
from moetune.domain.turns import TurnsRecord
from moetune.fit.costs import costs_of
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.model.in_turns import turns_seconds

_Point = TypeVar("_Point", StepPoint, TurnsPoint)


def with_steps(profile: Profile) -> Profile:
    """Return the profile with a record of every whole step among its samples.

    Steps whose operations were not measured, as in a very short session, have none; nor have those
    that other programs disturbed at every visit.
    """
    bare = replace(profile, steps=(), turns=())
    steps = tuple(_steps(bare))
    # The timeline of a plan has what layers' steps correct, so that of blocks in turns has it, too.
    return replace(profile, steps=steps, turns=tuple(_turns(replace(bare, steps=steps))))


def _steps(profile: Profile) -> Iterator[StepRecord]:
    costs = costs_of(profile)
    for point, visits in _clean_visits(profile, StepPoint):
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
            measured_seconds=statistics.median(_runs(undisturbed(visits))),
        )


def _turns(profile: Profile) -> Iterator[TurnsRecord]:
    costs, per_node = costs_of(profile), profile.machine.devices_per_node
    # Runs in turns scatter by themselves: visits that scatter little, or are fast, were lucky.
    for point, visits in _clean_visits(profile, TurnsPoint, but_for=(UNSTABLE,)):
        runs = _runs(visits)
        try:
            predicted = turns_seconds(point, costs=costs, per_node=per_node)
        except ProfileError:
            continue
        yield TurnsRecord(
            point=point, predicted_seconds=predicted, measured_seconds=statistics.median(runs),
            standard_error=_standard_error(runs),
        )  # fmt: skip


def _standard_error(runs: Sequence[float]) -> float:
    """Return that of the logarithm of the median of some runs; 0 of a single one."""
    if len(runs) == 1:
        return 0.0
    of_a_run = statistics.stdev(map(math.log, runs))
    return of_a_run * math.sqrt(math.pi / 2 / len(runs))


def _clean_visits(
    profile: Profile, kind: type[_Point], *, but_for: Sequence[str] = ()
) -> Iterator[tuple[_Point, list[Sample]]]:
    """Yield each point of a kind with its visits that have no marks but those named."""
    visits: dict[_Point, list[Sample]] = {}
    for sample in profile.samples:
        is_clean = sample.seconds and {*but_for}.issuperset(sample.marks)
        if isinstance(sample.point, kind) and is_clean:
            visits.setdefault(sample.point, []).append(sample)
    yield from sorted(visits.items())


def _runs(visits: Iterable[Sample]) -> list[float]:
    """Return the seconds of the runs of some visits."""
    return [seconds for visit in visits for seconds in visit.seconds]
