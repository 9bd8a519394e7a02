"""Monotone interpolation between measured sizes."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from moetune.fit.curve import (
    LINE_ERROR,
    SPACING_SHARE,
    Curve,
    curve_through,
    interpolation_errors,
    isotonic,
)

times = st.floats(1e-7, 1e3)
points = st.lists(
    st.tuples(st.integers(1, 2**40), times), min_size=1, max_size=25, unique_by=lambda xy: xy[0]
).map(sorted)


def through(given_points: list[tuple[int, float]], alpha_seconds: float = 0.0) -> Curve:
    return curve_through(
        sizes=[size for size, _ in given_points],
        seconds=[seconds for _, seconds in given_points],
        alpha_seconds=alpha_seconds,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_isotonic_equals_that_of_scipy(values: list[float]) -> None:
    np.testing.assert_allclose(
        isotonic(values), isotonic_regression(values).x, rtol=1e-9, atol=1e-9
    )


@given(points, st.lists(st.floats(0, 2**42), min_size=2, max_size=30), times)
def test_time_never_falls_as_the_size_grows(
    given_points: list[tuple[int, float]], sizes: list[float], alpha_seconds: float
) -> None:
    curve = through(given_points, alpha_seconds)
    everywhere = sorted([*sizes, *(float(size) for size, _ in given_points)])
    seconds = [curve.predict(size).seconds for size in everywhere]
    assert all(time > 0 for time in seconds[1:])
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds))


@given(points)
def test_a_measured_size_has_its_median_if_rising(given_points: list[tuple[int, float]]) -> None:
    rising = zip(given_points, sorted(seconds for _, seconds in given_points), strict=True)
    kept = [(size, seconds) for (size, _), seconds in rising]
    curve = through(kept)
    for size, seconds in kept:
        estimate = curve.predict(size)
        assert estimate.seconds == seconds
        assert estimate.trust == "measured"


@given(points.filter(lambda given_points: len(given_points) > 2), st.floats(0, 1))
def test_between_points_it_equals_the_monotone_cubic_of_scipy(
    given_points: list[tuple[int, float]], share: float
) -> None:
    rising = sorted(seconds for _, seconds in given_points)
    sizes = [float(size) for size, _ in given_points]
    curve = curve_through(sizes=sizes, seconds=rising)
    theirs = PchipInterpolator(np.log(sizes), np.log(rising))
    for low, high in pairwise(sizes):
        size = low + share * (high - low)
        assert curve.predict(size).seconds == pytest.approx(
            math.exp(theirs(math.log(size))), rel=1e-7
        )


@pytest.mark.parametrize("spacing", [2, 16, 4096])
def test_between_two_points_a_start_up_and_a_rate_are_met(spacing: int) -> None:
    def truth(size: float) -> float:
        return 1e-4 + size * 1e-9

    curve = through([(1024, truth(1024)), (1024 * spacing, truth(1024 * spacing))])
    sizes = np.linspace(1024, 1024 * spacing, 33)[1:-1]

    for size in sizes.tolist():
        estimate = curve.predict(size)
        assert estimate.seconds == pytest.approx(truth(size))
        assert estimate.trust == "interpolated"
    assert curve.seconds_at(sizes)[0] == pytest.approx([truth(size) for size in sizes.tolist()])


def test_below_the_smallest_size_the_line_of_the_first_two_points_goes_on() -> None:
    curve = through([(1000, 30e-6), (2000, 50e-6), (4000, 1.0)])
    assert curve.predict(500).seconds == pytest.approx(20e-6)
    assert curve.predict(0).seconds == pytest.approx(10e-6)
    assert curve.predict(500).trust == "extrapolated"


@given(points, times, st.floats(0, 1))
def test_below_the_smallest_size_no_time_is_under_alpha(
    given_points: list[tuple[int, float]], alpha_seconds: float, share: float
) -> None:
    curve = through(given_points, alpha_seconds)
    (smallest, *_), (first, *_) = curve.sizes[0], curve.seconds[0]
    time = curve.predict(smallest * share).seconds
    assert time >= min(alpha_seconds, first) * (1 - 1e-12)
    assert time <= first * (1 + 1e-12)


def test_interpolation_errors_is_zero_on_a_power_law_and_shows_one_bad_point() -> None:
    sizes = [2.0**at for at in range(10)]
    seconds = [size**0.5 for size in sizes]
    assert interpolation_errors(sizes=sizes, seconds=seconds, alpha_seconds=0.0) == pytest.approx(
        [0] * 8, abs=1e-12
    )
    seconds[5] *= 1.2
    errors = interpolation_errors(sizes=sizes, seconds=seconds, alpha_seconds=0.0)
    assert max(errors) == pytest.approx(SPACING_SHARE * (1 - 1 / 1.2))
    assert errors.index(max(errors)) == 4


def test_two_points_have_the_error_of_what_may_lie_between_them() -> None:
    """Whatever their times, by the distance of the sizes."""
    assert interpolation_errors(
        sizes=[1.0, 16.0], seconds=[2.0, 17.0], alpha_seconds=0.0
    ) == pytest.approx([LINE_ERROR * math.log(16)])
    near, far = (
        interpolation_errors(sizes=[1.0, size], seconds=[2.0, 2.0], alpha_seconds=0.0)
        for size in (2.0, 4e3)
    )
    assert near < far
    assert interpolation_errors(
        sizes=[1.0, 2.0], seconds=[3.0, 2.0], alpha_seconds=0.0
    ) == pytest.approx([0.25])
