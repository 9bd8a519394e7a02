"""How sure a layout is, against drawn errors."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.solve.joint.uncertainty import P05_RATIO, P95_RATIO, confidence_of


@pytest.mark.parametrize(
    "seconds",
    [[1.0], [1.0, 1.02], [1.0, 1.1, 1.1, 1.3], [1.0, 3.0], [1.2, 1.0], [1.0] * 6],
)
@pytest.mark.parametrize("spread", [0.03, 0.12, 0.4])
def test_the_sure_choice_is_that_of_drawn_errors(seconds: list[float], spread: float) -> None:
    draws = np.random.default_rng(7).normal(0.0, spread, (400_000, len(seconds)))
    steps = np.asarray(seconds) * np.exp(draws)
    regrets = steps[:, 0] / steps.min(axis=1) - 1.0
    found = confidence_of(seconds, own_spread=spread)
    assert found.probability_best == pytest.approx((regrets == 0).mean(), abs=0.01)
    assert found.expected_regret == pytest.approx(regrets.mean(), abs=0.004, rel=0.03)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_a_shared_factor_changes_the_range_alone(seconds: list[float]) -> None:
    found, other = confidence_of(seconds), confidence_of([2.0 * one for one in seconds])
    assert other.probability_best == pytest.approx(found.probability_best, abs=1e-6)
    assert other.expected_regret == pytest.approx(found.expected_regret, abs=1e-6)
    assert other.p95_step_seconds == pytest.approx(2.0 * found.p95_step_seconds)


def test_the_range_is_the_record_s() -> None:
    found = confidence_of([2.0, 3.0])
    assert found.p05_step_seconds == pytest.approx(2.0 * P05_RATIO)
    assert found.p05_step_seconds < 2.0 < found.p95_step_seconds
    assert found.p95_step_seconds == pytest.approx(2.0 * P95_RATIO)


def test_runtimes_of_which_less_is_public_have_wider_ranges() -> None:
    ranges = [confidence_of([2.0], target=name) for name in ("bridge", "torchtitan", "deepspeed")]
    for narrow, wide in pairwise(ranges):
        assert wide.p05_step_seconds < narrow.p05_step_seconds
        assert wide.p95_step_seconds > narrow.p95_step_seconds
