"""Layers with padded experts against the dense reference, on any number of ranks."""

import itertools

import pytest
import torch

from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from tests.runtime import grouped_workers, workers

TOKENS = (13, 13, 13)
STRATEGIES = ("none", "S1", "S2", "S3", "S4")


def padded(
    capacity_factor: float,
    *,
    top_k: int = 2,
    strategy: str = "none",
    activation: str = "gelu",
    degrees: tuple[int, int] = (1, 1),
) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(
        workers.D_MODEL, workers.D_HIDDEN, workers.NUM_EXPERTS, top_k,
        activation=activation, capacity_factor=capacity_factor, pad_to_capacity=True,  # type: ignore[arg-type] # of the grid
        memory_reuse=strategy, dtype=torch.float64,
    )  # fmt: skip
    layer.poison_buffers()
    layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))
    return layer


def dense_matrix() -> None:
    """Every strategy, unequal degrees, and capacities that drop much, a little, and nothing."""
    grid = itertools.product(STRATEGIES, (0.4, 1.25, 9.0), ((4, 4), (3, 5)))
    cases = [("none", 1.25, (1, 1)), *grid]
    for place, (strategy, capacity_factor, degrees) in enumerate(cases):
        top_k = (1, 3)[place // 2 % 2]
        layer = padded(
            capacity_factor, top_k=top_k, strategy=strategy, degrees=degrees,
            activation=("relu", "gelu", "swiglu")[place % 3],
        )  # fmt: skip
        workers.check_against_dense(layer, TOKENS)


def grouped_matrix() -> None:
    """The same where one kernel takes the rows of all experts."""
    with grouped_workers.grouped():
        dense_matrix()


def on_ranks() -> None:
    dense_matrix()
    grouped_matrix()
    other_tokens()


def other_tokens() -> None:
    """Ranks may change their number of tokens together, and are told if they differ."""
    layer, rank = padded(1.25), workers._rank()
    for num_tokens in (8, 6, 8):
        assert layer(torch.ones(num_tokens, workers.D_MODEL).double()).shape[0] == num_tokens
    with pytest.raises(RankMismatchError, match="20 tokens"):
        layer(torch.ones(20 + rank, workers.D_MODEL).double())
    with pytest.raises((InputError, RankMismatchError)):
        layer(torch.ones(8, workers.D_MODEL + 1).double())
