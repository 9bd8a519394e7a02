"""Times of many curves at once, against each curve by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.fit.curve import curve_through
from moetune.fit.many_curves import seconds_of_each
from moetune.fit.pool import Series

SIZES = st.integers(1, 2**40).map(float)
CURVES = st.lists(
    st.dictionaries(SIZES, st.floats(1e-7, 1e3), min_size=1, max_size=9), min_size=1, max_size=6
)


def series(points: dict[float, float]) -> Series:
    sizes = tuple(sorted(points))
    medians = tuple(points[one] for one in sizes)
    return Series(sizes=sizes, times=tuple((one,) for one in medians), medians=medians)


@pytest.mark.filterwarnings("error")
@given(CURVES, st.lists(SIZES, min_size=1, max_size=9), st.sampled_from([0.0, 1e-5, 1.0]))
def test_each_curve_takes_what_it_takes_alone(
    curves: list[dict[float, float]], sizes: list[float], alpha_seconds: float
) -> None:
    asked = np.array([*sizes, *curves[0]])

    found = seconds_of_each([series(one) for one in curves], asked, alpha_seconds)

    for row, points in zip(found.tolist(), curves, strict=True):
        one = series(points)
        alone = curve_through(sizes=one.sizes, seconds=one.medians, alpha_seconds=alpha_seconds)
        assert row == pytest.approx([alone.predict(size).seconds for size in asked], rel=1e-9)


@pytest.mark.parametrize(
    ("points", "size", "seconds"),
    [
        ({8.0: 2.0}, 4.0, 2.0),
        ({8.0: 2.0}, 16.0, 4.0),
        ({8.0: 2.0, 16.0: 3.0}, 12.0, 2.5),
        ({8.0: 2.0, 16.0: 3.0}, 4.0, 1.5),
        ({1.0: 1.0, 2.0: 4.0, 8.0: 64.0}, 4.0, 16.0),
        ({1.0: 1.0, 2.0: 4.0, 8.0: 64.0}, 16.0, 128.0),
        ({1.0: 3.0, 2.0: 3.0, 4.0: 3.0}, 3.0, 3.0),
    ],
)
def test_lines_powers_and_ends(points: dict[float, float], size: float, seconds: float) -> None:
    others = series({1.0: 2.0, 3.0: 1.0, 5.0: 7.0, 9.0: 8.0})

    found = seconds_of_each([others, series(points)], np.array([size]), 0.0)

    assert found[1, 0] == pytest.approx(seconds)
