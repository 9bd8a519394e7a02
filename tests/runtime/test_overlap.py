"""Two batches in flight: gradients and losses are those of one batch after the other."""

from functools import partial

import pytest
import torch

import moetune
from moetune.runtime.moe.turns import BatchTurn, OtherBatchError, Turns, in_turn
from tests.ranks import run_ranks
from tests.runtime import accelerator_worker, overlap_workers
from tests.runtime.companion_nets import Net, batch, check_equal, loss_of


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_gradients_are_those_of_one_process(num_ranks: int) -> None:
    assert run_ranks(overlap_workers.several_ranks, num_ranks) == [""] * num_ranks


def test_torch_runs_both_backward_passes_of_an_accelerator_in_the_batches_own_threads() -> None:
    assert run_ranks(accelerator_worker.backward_passes_take_turns, 1) == [""]


def test_one_rank_and_autocast_of_the_caller() -> None:
    kept: list[torch.dtype] = []

    def loss(net: Net, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
        return loss_of(net, x)

    net, alone = Net(), Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = moetune.BatchOverlap[torch.Tensor](net, partial(loss, net))([batch(0), batch(1)])
        assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = [loss_of(alone, batch(index)) for index in range(2)]
    for each in wanted:
        each.backward()
    assert kept == [torch.bfloat16] * 2
    assert [float(one) for one in found] == [float(one.detach()) for one in wanted]
    check_equal(
        {name: each.grad for name, each in net.named_parameters() if each.grad is not None},
        {name: each.grad for name, each in alone.named_parameters() if each.grad is not None},
        tolerance=0,
    )


def test_a_batch_that_ended_gives_every_turn_away_and_a_failed_one_ends_the_other() -> None:
    turns = Turns()
    first, second = BatchTurn(turns, 0), BatchTurn(turns, 1)
    with in_turn(first):
        pass
    with in_turn(second), second.given():
        pass
    failed = Turns()
    with pytest.raises(ValueError, match="first"), in_turn(BatchTurn(failed, 0)):
        raise ValueError("first")
    with pytest.raises(OtherBatchError), in_turn(BatchTurn(failed, 1)):
        pass
