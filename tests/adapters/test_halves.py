"""Models of transformers whose batches run in halves."""

from tests.adapters import halves_workers
from tests.ranks import run_ranks


def test_halves_of_positions_have_the_numbers_of_transformers_own_classes() -> None:
    assert run_ranks(halves_workers.all_of_it, 2) == [""] * 2
