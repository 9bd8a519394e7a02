"""The sign of an error is the same everywhere: predicted over measured, minus one."""

import pytest

from moetune.domain.records import prediction_error


def test_a_step_slower_than_predicted_has_an_error_below_0() -> None:
    assert prediction_error(1.0, 1.25) == pytest.approx(-0.2)
    assert prediction_error(3.0, 2.5) == pytest.approx(0.2)


def test_a_step_of_no_time_has_no_error() -> None:
    assert prediction_error(1.0, 0.0) == 0.0
