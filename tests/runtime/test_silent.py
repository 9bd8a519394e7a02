"""What must not go wrong in layers without a word, on real ranks."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runtime import silent_workers


# One start of the ranks for all that they show.
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_goes_wrong_without_a_word(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(silent_workers.any_ranks, num_ranks, str(tmp_path))
    assert reports == [""] * num_ranks
