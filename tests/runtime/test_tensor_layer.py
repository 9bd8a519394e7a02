"""Experts inside a tensor-parallel group, against the dense reference and `MoELayer`."""

import pytest

from moetune.domain.errors import InputError
from moetune.runtime.tensor_layer import TensorExpertLayer
from tests.ranks import run_ranks
from tests.runtime import tensor_workers


def test_one_rank_equals_dense() -> None:
    tensor_workers.dense_matrix(("relu", "gelu", "silu", "swiglu"))


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_dense(num_ranks: int) -> None:
    reports = run_ranks(tensor_workers.dense_matrix, num_ranks, ("relu", "swiglu"))
    assert reports == [""] * num_ranks


def test_one_rank_is_the_other_layer() -> None:
    tensor_workers.checkpoints_fit_each_other()


@pytest.mark.dist
def test_checkpoints_of_one_layer_fit_the_other() -> None:
    assert run_ranks(tensor_workers.checkpoints_fit_each_other, 2) == ["", ""]


@pytest.mark.dist
def test_ranks_with_other_tokens_all_raise() -> None:
    assert run_ranks(tensor_workers.other_tokens_are_refused_everywhere, 2) == ["", ""]


def test_what_would_drop_pairs_or_reuse_memory_is_refused() -> None:
    with pytest.raises(InputError, match="drop no pair"):
        TensorExpertLayer(4, 8, 2, capacity_factor=1.0)
    with pytest.raises(InputError, match="not available in a tensor-parallel group"):
        TensorExpertLayer(4, 8, 2, memory_reuse="S4")
