"""Two halves of one batch in flight: the numbers are those of the whole batch."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import halves_workers


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_halves_give_the_numbers_of_the_whole_batch(num_ranks: int) -> None:
    assert run_ranks(halves_workers.several_ranks, num_ranks) == [""] * num_ranks
