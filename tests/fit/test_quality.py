"""The summary of a fit's errors, worked out by hand."""

import pytest

from moetune.domain.profile import FitError
from moetune.fit.profile import fit_error


def summary(errors: list[float]) -> FitError | None:
    return fit_error(errors=errors, sizes=(1.0, 2.0), times=((2.0,), (3.0,)), seed=0)


def test_a_twentieth_of_the_errors_lies_above_the_95th_percentile() -> None:
    # 0.00, 0.01, … 1.00: of 101 errors the hundredths are the percentiles.
    found = summary([at / 100 for at in range(101)])
    assert found is not None
    assert found.median == pytest.approx(0.50)
    assert found.p95 == pytest.approx(0.95)
    assert (found.num_points, found.low, found.high) == (2, 1.0, 2.0)
    # The line through both points: 1 s, and 1 s for each size.
    assert found.alpha_seconds == pytest.approx((1.0, 1.0))
    assert found.beta_seconds == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("usual", "tail", "quality"),
    [
        (0.05, 0.15, "good"), (0.05, 0.151, "usable"), (0.051, 0.06, "usable"),
        (0.10, 0.30, "usable"), (0.10, 0.301, "suspect"), (0.101, 0.11, "suspect"),
    ],
)  # fmt: skip
def test_a_label_needs_both_the_median_and_the_tail(
    usual: float, tail: float, quality: str
) -> None:
    # Of 101 errors the six largest begin at the 95th percentile; the 90th is still usual.
    found = summary([usual] * 95 + [tail] * 6)
    assert found is not None
    assert found.quality == quality


def test_nothing_left_out_has_no_error() -> None:
    assert summary([]) is None
