"""Gradients of replicas, reduced between exchanges, against one process on the whole batch."""

import pytest
import torch

import moetune
from tests.ranks import run_ranks
from tests.runtime import replicate_workers
from tests.runtime.companion_nets import Net, batch, check_equal, loss_of


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_gradients_are_those_of_one_process(num_ranks: int) -> None:
    assert run_ranks(replicate_workers.several_ranks, num_ranks) == [""] * num_ranks


def test_one_rank_is_left_alone() -> None:
    net, wanted = moetune.replicate(Net()), Net()
    for one in (net, wanted):
        loss_of(one, batch(0)).backward()
    grads = [{name: each.grad for name, each in one.named_parameters()} for one in (net, wanted)]
    check_equal(grads[0], grads[1], tolerance=0)  # type: ignore[arg-type] # all have a gradient
    with moetune.no_sync(net):
        assert torch.is_grad_enabled()
