"""Measured costs: differences that nobody can measure decide for fewer chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds
from moetune.domain.layer import PHASES, LayerKey, LayerShape
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.parallelism import AllToAllCosts
from tests.solve.costs_by_hand import LinearCosts

LAYER = LayerShape(d_model=512, d_hidden=1024, num_experts=8)


def chooser(*, is_measured: bool, bounds: Bounds | None = None) -> DegreeChooser:
    key = LayerKey(layer=LAYER, num_ranks=8, dtype="float32")
    costs = AllToAllCosts(key=key, costs=LinearCosts(has_points=is_measured))
    return DegreeChooser(costs=costs, bounds=bounds or Bounds())


def seconds_by_degree(made: DegreeChooser, tokens: int) -> dict[int, float]:
    """Return the time of both phases in as many chunks."""
    degrees = made.bounded("forward", tokens)
    return {one: sum(made.time(phase, tokens, one).seconds for phase in PHASES) for one in degrees}


@given(tokens=st.integers(1, 2**16))
def test_no_smaller_degree_is_within_noise_and_the_chosen_one_is_where_chunks_pay(
    tokens: int,
) -> None:
    made = chooser(is_measured=True)
    seconds = seconds_by_degree(made, tokens)
    limit = min(seconds.values()) * (1 + NOISE)
    around = made.costs.overhead(tokens=tokens).seconds

    chosen, backward = made.degrees(tokens) or (0, 0)

    assert chosen == backward
    if around + min(seconds.values()) > (around + seconds[1]) * (1 - WORTH):
        assert chosen == 1
        return
    assert seconds[chosen] <= limit
    assert all(seconds[degree] > limit for degree in range(1, chosen))


@pytest.mark.parametrize("bounds", [Bounds(backward_degree=3), Bounds(forward_degree=3)])
def test_a_pin_of_one_phase_holds_for_both(bounds: Bounds) -> None:
    made = chooser(is_measured=True, bounds=bounds)
    assert [list(made.bounded(phase, 4096)) for phase in PHASES] == [[3], [3]]
    assert made.degrees(4096) == (3, 3)
