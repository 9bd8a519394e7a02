"""A session that changed while it ran is marked, and one that was only noisy is not."""

from moetune.domain.samples import CopyPoint, GemmPoint, Point, Sample
from moetune.measure.noise import DRIFT, mark_drift

FIRST = GemmPoint(dtype="float32", rows=8, d_in=8, d_out=8)
SECOND = GemmPoint(dtype="float32", rows=16, d_in=8, d_out=8)
COPY = CopyPoint(direction="h2d", pinned=True, num_bytes=64)


def sample(point: Point, *seconds: float) -> Sample:
    return Sample(point=point, seconds=seconds)


def marked(*samples: Sample) -> list[bool]:
    return [DRIFT in one.marks for one in mark_drift(samples)]


def test_a_session_between_two_different_samples_of_one_point_drifted() -> None:
    before, after = sample(FIRST, 1.0, 1.0, 1.01, 1.0), sample(FIRST, 1.1, 1.1, 1.11, 1.1)
    assert marked(before, sample(COPY, 1.0), after) == [True, True, True]


def test_a_change_within_three_percent_is_none() -> None:
    before, after = sample(FIRST, 1.0, 1.0, 1.0, 1.0), sample(FIRST, 1.02, 1.02, 1.02, 1.02)
    assert marked(before, sample(COPY, 1.0), after) == [False, False, False]


def test_a_change_within_the_samples_own_spread_is_none() -> None:
    before, after = sample(FIRST, 0.8, 0.9, 1.1, 1.2), sample(FIRST, 0.9, 1.1, 1.2, 1.3)
    assert marked(before, after) == [False, False]


def test_only_the_session_that_drifted_is_marked() -> None:
    calm = [sample(FIRST, 1.0), sample(COPY, 1.0), sample(FIRST, 1.0)]
    wild = [sample(SECOND, 1.0), sample(COPY, 1.0), sample(SECOND, 2.0)]
    assert marked(*calm, *wild) == [False] * 3 + [True] * 3


def test_failed_samples_tell_nothing_and_marks_are_not_doubled() -> None:
    broken = Sample(point=FIRST, seconds=(), error="out of memory")
    assert marked(broken, sample(FIRST, 1.0), broken) == [False, False, False]
    once = mark_drift([sample(FIRST, 1.0), sample(FIRST, 2.0)])
    assert mark_drift(once) == once
