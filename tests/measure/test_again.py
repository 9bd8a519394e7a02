"""Which visits of a point count, and when it needs no further one."""

import math
import random

from moetune.domain.samples import CopyPoint, Sample, undisturbed
from moetune.measure.schedule import CERTAIN, relative_uncertainty

COPY = CopyPoint(direction="h2d", pinned=True, num_bytes=64)


def sample(*seconds: float, marks: tuple[str, ...] = ()) -> Sample:
    return Sample(point=COPY, seconds=seconds, marks=marks)


def test_the_slower_half_of_the_visits_does_not_count() -> None:
    visits = [sample(1.0), sample(3.0), sample(1.1), sample(2.0)]
    assert undisturbed(visits) == (visits[0], visits[2])
    assert undisturbed(visits[:3]) == (visits[0], visits[2])
    assert undisturbed(visits[1:2]) == (visits[1],)


def test_marked_visits_count_only_where_all_are_marked() -> None:
    fast, slow = sample(1.0, marks=("busy",)), sample(2.0)
    assert undisturbed([fast, slow]) == (slow,)
    assert undisturbed([fast]) == (fast,)


def test_a_point_is_certain_when_its_undisturbed_visits_agree() -> None:
    assert relative_uncertainty([sample(1.0)]) == math.inf
    assert relative_uncertainty([sample(1.0), sample(1.01)]) == math.inf
    assert relative_uncertainty([sample(1.0), sample(1.01), sample(5.0)]) <= CERTAIN
    assert relative_uncertainty([sample(1.0), sample(1.3), sample(1.4)]) > CERTAIN


def test_half_of_the_visits_may_be_disturbed_and_quiet_visits_are_hardly_biased() -> None:
    generator = random.Random(5)
    quiet, half = [], []
    for _ in range(2000):
        times = [[generator.gauss(1.0, 0.02) for _ in range(8)] for _ in range(6)]
        quiet.append(typical([sample(*visit) for visit in times]))
        slow = [[2 * seconds for seconds in visit] for visit in times[::2]]
        half.append(typical([sample(*visit) for visit in (*times[1::2], *slow)]))
    # A visit's median has a standard deviation of 0.9 %; 0.7 of them is the stated bias.
    assert -0.009 < sum(quiet) / len(quiet) - 1 < 0.0
    assert abs(sum(half) / len(half) - 1) < 0.003


def typical(visits: list[Sample]) -> float:
    return sample(*(t for visit in undisturbed(visits) for t in visit.seconds)).median_seconds
