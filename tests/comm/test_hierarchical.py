import pytest
import torch

from moetune.comm.group import OneRank
from moetune.comm.hierarchical import hierarchical_of
from moetune.comm.relay import columns, sums, transposed
from moetune.domain.errors import InputError
from tests.comm import hierarchical_workers as workers
from tests.ranks import run_ranks


def test_four_ranks_on_two_nodes_exchange_and_say_what_goes_wrong() -> None:
    """One start of ranks: in the end one of them dies, and the others say so."""
    dead = "the rank was killed or hung"
    assert run_ranks(workers.every_check_and_a_death, 4) == ["", "", "", dead]


def test_six_ranks_on_two_nodes_exchange() -> None:
    assert run_ranks(workers.exchanges_of_three_ranks_a_node, 6) == [""] * 6


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
