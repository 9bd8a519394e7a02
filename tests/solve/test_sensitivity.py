"""Turning points and slopes, against hand-written functions of a factor."""

import pytest

from moetune.solve.sensitivity import FASTER, SLOWER, seconds_per_percent, turn_of


def test_the_slope_of_a_line_is_a_hundredth_of_its_part() -> None:
    assert seconds_per_percent(lambda factor: 5.0 + 3.0 * factor) == pytest.approx(0.03)


def test_at_a_kink_the_slope_is_the_mean_of_both_sides() -> None:
    assert seconds_per_percent(lambda factor: max(factor, 1.0)) == pytest.approx(0.005)


@pytest.mark.parametrize("at", [1.003, 1.18, 1.5, 1.99])
def test_a_turn_is_found_where_it_is(at: float) -> None:
    found = turn_of(lambda factor: "new" if factor >= at else "old", SLOWER)
    assert found is not None
    assert found.choice == "new"
    assert at <= found.factor <= at * 1.0021
    down = turn_of(lambda factor: "new" if factor <= 1 / at else "old", FASTER)
    assert down is not None
    assert 1 / at / 1.0021 <= down.factor <= 1 / at


def test_no_turn_up_to_twice_the_time_is_none() -> None:
    assert turn_of(lambda factor: "new" if factor > 2.001 else "old", SLOWER) is None


def test_the_first_of_two_turns_is_the_one_that_is_told() -> None:
    def choice(factor: float) -> str:
        return "third" if factor > 1.08 else "second" if factor > 1.06 else "first"

    found = turn_of(choice, SLOWER)
    assert found is not None
    assert found.choice == "second"
    assert found.factor == pytest.approx(1.06, rel=3e-3)
