"""Noisy points are measured again, each in its turn, and sure ones are not."""

from moetune.domain.samples import CopyPoint, Point, Sample
from moetune.measure.noise import next_noisy, relative_uncertainty

CALM, WILD, WILDER = (
    CopyPoint(direction="h2d", pinned=True, num_bytes=2**size) for size in range(3)
)


def sample(point: CopyPoint, *seconds: float) -> Sample:
    return Sample(point=point, seconds=seconds)


def test_the_least_certain_of_the_least_visited_points_is_next() -> None:
    wild, wilder = sample(WILD, 1.0, 1.5, 2.0), sample(WILDER, 1.0, 2.0, 3.0)
    samples: dict[Point, list[Sample]] = {
        CALM: [sample(CALM, 1.0, 1.0, 1.01)],
        WILD: [wild],
        WILDER: [wilder],
    }
    assert next_noisy(samples) == WILDER
    samples[WILDER].append(wilder)
    assert next_noisy(samples) == WILD


def test_sure_failed_and_hopeless_points_are_left_alone() -> None:
    failed = Sample(point=WILD, seconds=(), error="out of memory")
    hopeless = [sample(WILDER, 1.0, 9.0)] * 5
    samples: dict[Point, list[Sample]] = {
        CALM: [sample(CALM, *[1.0] * 8)],
        WILD: [failed],
        WILDER: hopeless,
    }
    assert next_noisy(samples) is None
    assert next_noisy({}) is None


def test_more_visits_of_one_point_make_its_median_surer() -> None:
    visit = sample(WILD, 1.0, 1.1, 1.2, 1.3)
    once, thrice = relative_uncertainty([visit]), relative_uncertainty([visit] * 3)
    assert 0 < thrice < once
