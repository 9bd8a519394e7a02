"""A vocabulary cut over ranks, against torch's own embedding, linear layer and cross-entropy."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import vocabulary_workers


def test_one_rank_equals_whole() -> None:
    vocabulary_workers.equal_whole()


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_whole(num_ranks: int) -> None:
    assert run_ranks(vocabulary_workers.equal_whole, num_ranks) == [""] * num_ranks
