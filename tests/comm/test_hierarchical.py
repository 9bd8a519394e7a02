from collections.abc import Callable

import pytest
import torch

from moetune.comm.group import OneRank
from moetune.comm.hierarchical import hierarchical_of
from moetune.comm.relay import columns, sums, transposed
from moetune.domain.errors import InputError
from tests.comm import hierarchical_workers as workers
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [4, 6])
@pytest.mark.parametrize(
    "worker",
    [
        workers.exchanges_equal_the_flat_ones,
        workers.many_are_under_way_both_ways,
        workers.equal_parts_and_blocks,
        workers.other_collectives_are_the_groups,
        workers.every_transfer_is_waited_for,
    ],
)
def test_hierarchical_exchanges_of_two_nodes(worker: Callable[[], None], num_ranks: int) -> None:
    assert run_ranks(worker, num_ranks) == [""] * num_ranks


@pytest.mark.parametrize(
    "worker", [workers.what_cannot_be_is_refused, workers.a_wrong_size_is_told]
)
def test_what_goes_wrong_is_told_by_name(worker: Callable[[], None]) -> None:
    assert run_ranks(worker, 4) == [""] * 4


def test_a_death_is_told_to_the_others() -> None:
    assert run_ranks(workers.a_rank_dies, 4) == ["", "", "", "the rank was killed or hung"]


def test_one_rank_has_no_hierarchy() -> None:
    with pytest.raises(InputError, match="the group has 1 ranks on 1 node of 2"):
        hierarchical_of(OneRank(), ranks_per_node=2)


def test_blocks_change_places() -> None:
    counts = ((1, 0, 2), (2, 1, 0))
    rows = torch.tensor([0, 20, 21, 100, 101, 110])

    assert transposed(rows, counts).tolist() == [0, 100, 101, 110, 20, 21]
    assert transposed(transposed(rows, counts), columns(counts)).tolist() == rows.tolist()
    assert sums(counts) == [3, 3]
    assert sums(columns(counts)) == [3, 1, 2]
