"""Two halves of one batch in flight: the numbers are those of the whole batch."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.group import OneRank
from moetune.domain.training import BATCH_SPLITS, BatchSplit
from moetune.runtime.moe.halves import Halves
from tests.ranks import run_ranks
from tests.runtime import halves_workers
from tests.runtime.companion_nets import check_equal
from tests.runtime.halves_workers import Model, halved, loss_of, tokens
from tests.runtime.overlap_workers import grads_of


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_halves_give_the_numbers_of_the_whole_batch(num_ranks: int) -> None:
    assert run_ranks(halves_workers.several_ranks, num_ranks) == [""] * num_ranks


class Checkpointed(nn.Module):
    """The blocks, each computed again in the backward pass by torch."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.model = Model(communicator=OneRank())
        self.use_reentrant = use_reentrant

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        for block in self.model.blocks:
            x_BSD = checkpoint(block, x_BSD, use_reentrant=self.use_reentrant)
        return x_BSD


@pytest.mark.parametrize("split", BATCH_SPLITS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_torch_compute_a_half_again(
    split: BatchSplit,
    use_reentrant: bool,  # noqa: FBT001 - a case
) -> None:
    whole, x_BSD = Model(communicator=OneRank()), tokens(0).requires_grad_()
    whole(x_BSD).square().sum().backward()
    again = Checkpointed(use_reentrant=use_reentrant)
    overlap = moetune.BatchOverlap[torch.Tensor](
        again, lambda half: again(half).square().sum(), split=split
    )
    overlap(halves := [one.detach().requires_grad_() for one in halved(x_BSD, split, 2)])
    check_equal(grads_of(again.model), grads_of(whole))
    inputs = [one.grad for one in halves if one.grad is not None]
    found = torch.cat(inputs, dim=0 if split == "sequences" else 1)
    assert x_BSD.grad is not None
    assert torch.allclose(found, x_BSD.grad, rtol=1e-11)


@pytest.mark.parametrize("split", BATCH_SPLITS)
def test_nothing_of_a_step_outlives_the_next_one(split: BatchSplit) -> None:
    def of_steps() -> int:
        gc.collect()
        return sum(isinstance(one, Halves) for one in gc.get_objects())

    before, x_BSD = of_steps(), tokens(0)
    model = Model(communicator=OneRank())
    overlap = moetune.BatchOverlap[torch.Tensor](
        model, partial(loss_of, model, x_BSD.numel()), split=split
    )
    for _ in range(4):
        overlap(halved(x_BSD, split, 2))
    assert of_steps() <= before + 1
    del model, overlap
    assert of_steps() == before
