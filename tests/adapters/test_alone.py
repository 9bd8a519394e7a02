"""One rank that does alone what all ranks do together ends with an error by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters import alone_workers
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("worker", "num_ranks"),
    [
        (alone_workers.evaluates_a_layer, 2), (alone_workers.evaluates_a_layer, 4),
        (alone_workers.evaluates_stages, 2), (alone_workers.evaluates_stages, 4),
        (alone_workers.saves, 2), (alone_workers.saves, 4),
    ],
)  # fmt: skip
def test_one_rank_alone_has_an_error_within_the_timeout(
    worker: Callable[[str], None], num_ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(worker, num_ranks, str(tmp_path)) == [""] * num_ranks
