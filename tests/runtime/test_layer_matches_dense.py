"""The layer against a dense float64 reference, on real ranks."""

import pytest

from tests.ranks import run_ranks
from tests.runtime import workers

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
EVERY_DEGREE = range(1, 9)
SOME = ("relu", "swiglu"), (1, 2, 5, 8)
"""Of several ranks; what lies in between is seen on fewer."""


def test_layer_equals_dense_without_torch_distributed() -> None:
    workers.dense_matrix(ACTIVATIONS, EVERY_DEGREE)


@pytest.mark.parametrize(
    ("num_ranks", "activations", "degrees"),
    [
        (2, ACTIVATIONS, EVERY_DEGREE),
        pytest.param(3, *SOME, marks=pytest.mark.thorough),
        (4, *SOME),
    ],
)
def test_layer_equals_dense_on_ranks_with_uneven_tokens(
    num_ranks: int, activations: tuple[str, ...], degrees: tuple[int, ...]
) -> None:
    assert run_ranks(workers.dense_matrix, num_ranks, activations, degrees) == [""] * num_ranks
