"""Slopes, against hand-written functions of a factor."""

import pytest

from moetune.solve.sensitivity import seconds_per_percent


def test_the_slope_of_a_line_is_a_hundredth_of_its_part() -> None:
    assert seconds_per_percent(lambda factor: 5.0 + 3.0 * factor) == pytest.approx(0.03)


def test_at_a_kink_the_slope_is_the_mean_of_both_sides() -> None:
    assert seconds_per_percent(lambda factor: max(factor, 1.0)) == pytest.approx(0.005)
