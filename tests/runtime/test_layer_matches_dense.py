"""The layer against a dense float64 reference, on real ranks."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import workers

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")


def test_layer_equals_dense_without_torch_distributed() -> None:
    workers.dense_matrix(ACTIVATIONS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_layer_equals_dense_on_ranks_with_uneven_tokens(num_ranks: int) -> None:
    assert run_ranks(workers.dense_matrix, num_ranks, ACTIVATIONS) == [""] * num_ranks
