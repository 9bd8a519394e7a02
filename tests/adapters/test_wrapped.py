"""Adapted models under what else trains, wraps and saves models, on real ranks."""

from pathlib import Path

import pytest

from tests.adapters import kinds_workers, wrapped_workers
from tests.ranks import run_ranks


# One start of the ranks for all that they show: they import transformers.
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_nothing_goes_wrong_without_a_word(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(wrapped_workers.any_ranks, num_ranks, str(tmp_path))
    assert reports == [""] * num_ranks


def test_one_rank_trains_low_ranks_of_experts() -> None:
    wrapped_workers.loras_of_experts()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_checkpoints_and_frozen_parts_change_no_gradient(num_ranks: int) -> None:
    assert run_ranks(kinds_workers.any_ranks, num_ranks) == [""] * num_ranks
