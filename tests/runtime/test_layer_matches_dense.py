"""The layer against a dense float64 reference, on real ranks with uneven tokens.

With all activations kept and with reused memory, whose buffers are poisoned; with products one by
one and with grouped kernels.
"""

from collections.abc import Callable, Sequence

import pytest

from tests.ranks import run_ranks
from tests.runtime import grouped_workers as grouped
from tests.runtime import workers

ALL = ("relu", "gelu", "silu", "swiglu")
SOME = ("relu", "swiglu")
"""Of several ranks; what lies in between is seen on fewer."""
GROUPED = ("gelu", "swiglu")
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("num_ranks", "matrix", "activations", "degrees"),
    [
        (1, workers.dense_matrix, ALL, range(1, 9)),
        (2, workers.dense_matrix, ALL, (1, 3, 8)),
        pytest.param(2, workers.dense_matrix, ALL, range(1, 9), marks=THOROUGH),
        pytest.param(3, workers.dense_matrix, SOME, (1, 2, 5, 8), marks=THOROUGH),
        (4, workers.dense_matrix, ("swiglu",), (1, 5)),
        pytest.param(4, workers.dense_matrix, SOME, (1, 2, 5, 8), marks=THOROUGH),
        (1, workers.reuse_matrix, SOME, (1, 2, 5, 8)),
        pytest.param(1, workers.reuse_matrix, ALL, range(1, 9), marks=THOROUGH),
        pytest.param(2, workers.reuse_matrix, SOME, (1, 2, 3, 6, 8), marks=THOROUGH),
        (4, workers.reuse_matrix, ("swiglu",), (3,)),
        pytest.param(4, workers.reuse_matrix, ("swiglu",), (1, 2, 5, 8), marks=THOROUGH),
        (1, grouped.dense_matrix, ALL, (1, 2, 3, 8)),
        (1, grouped.reuse_matrix, GROUPED, (1, 3, 4)),
        pytest.param(2, grouped.dense_matrix, GROUPED, (1, 3, 4), marks=THOROUGH),
        (3, grouped.dense_matrix, GROUPED, (1, 3, 4)),
    ],
)
def test_layer_equals_dense(
    num_ranks: int,
    matrix: Callable[[Sequence[str], Sequence[int]], None],
    activations: Sequence[str],
    degrees: Sequence[int],
) -> None:
    if num_ranks == 1:  # without torch.distributed
        matrix(activations, degrees)
    else:
        assert run_ranks(matrix, num_ranks, activations, degrees) == [""] * num_ranks
