"""Exchanges in two steps on NCCL: streams that wait for each other, memory, and ranks' orders."""

import itertools

import pytest
import torch

from moetune.comm.gloo import communicator_of
from moetune.comm.hierarchical import HierarchicalCommunicator, hierarchical_of
from moetune.comm.relay import Relay
from moetune.comm.transfer import Transfer
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime.gpu_runs import BOTH, GPU, NCCL, on_every_rank

RANKS, PER_NODE = 4, 2
ONES = [[1, 1], [1, 1]]


def _group() -> HierarchicalCommunicator:
    torch.cuda.set_device(GPU)
    found = hierarchical_of(communicator_of(None), ranks_per_node=PER_NODE)
    assert isinstance(found, HierarchicalCommunicator)
    return found


def _start(
    group: HierarchicalCommunicator, *, is_homeward: bool, told: bool = True
) -> tuple[Transfer, torch.Tensor]:
    rows, output = torch.ones(RANKS, 2, device=GPU), torch.zeros(RANKS, 2, device=GPU)
    relay = Relay(counts=ONES, is_homeward=is_homeward) if told else None
    splits = [1] * RANKS
    return group.all_to_all(output, rows, splits, splits, "it", relay=relay), output


@pytest.mark.parametrize("backends", [BOTH, NCCL])
def test_many_exchanges_both_ways_are_in_order_on_streams_and_among_ranks(
    backends: dict[str, str],
) -> None:
    def program(_: FakeCuda) -> None:
        group = _group()
        assert group.relayed_blocks(torch.ones(RANKS, 3, device=GPU), "counts").shape == (2, 2, 3)
        issued = [_start(group, is_homeward=turn in {2, 3, 5}) for turn in range(6)]
        issued.append(_start(group, is_homeward=False, told=False))
        for transfer, output in reversed(issued):
            transfer.wait()
            assert torch.equal(output.add_(1), torch.full((RANKS, 2), 2.0, device=GPU))
        # The memory of the first ones is handed out again.
        for _turn in range(3):
            _start(group, is_homeward=True)[0].wait()

    for machine in on_every_rank(program, num_ranks=RANKS, backends=backends):
        # The only stops of the host: the test reads values, and one exchange was not told.
        assert not any("all_to_all" in one for one in machine.syncs)


def test_the_first_step_of_an_exchange_runs_beside_the_second_of_the_one_before() -> None:
    def program(cuda: FakeCuda) -> None:
        group = _group()
        issued = [_start(group, is_homeward=False) for _ in range(3)]
        torch.ones(2, 2, device=GPU).matmul(torch.ones(2, 2, device=GPU))
        for transfer, _ in issued:
            transfer.wait()
        steps = [one for one in cuda.operations if one.label.startswith("all_to_all")]
        across, inside = steps[::2], steps[1::2]
        assert len(across) == len(inside) == 3
        (computed,) = [one for one in cuda.operations if one.label == "mm"]
        assert computed.end_seconds < across[-1].end_seconds  # behind no step
        for before, after in itertools.pairwise(range(3)):
            assert across[after].start_seconds < inside[before].end_seconds

    on_every_rank(program, num_ranks=RANKS)


@pytest.mark.parametrize("waits", ["transfer", "future", "nobody"])
@pytest.mark.parametrize("is_homeward", [False, True])
def test_who_does_not_wait_is_found(waits: str, is_homeward: bool) -> None:  # noqa: FBT001 - a parameter
    with FakeCuda() as cuda, MirrorWorld(cuda, num_ranks=RANKS):
        transfer, output = _start(_group(), is_homeward=is_homeward)
        future = transfer.future()
        assert future is not None
        assert future.done()
        torch.cuda.set_device(0)  # no device of the exchange
        if waits != "nobody":
            (future if waits == "future" else transfer).wait()
        output.add_(1)
        transfer.wait()
        found, cuda.ledger.faults[:] = list(cuda.faults), []
    assert bool(found) == (waits == "nobody")


def test_a_transfer_that_an_error_drops_keeps_its_memory_until_it_has_ended() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, num_ranks=RANKS):
        group = _group()
        for is_homeward in (False, True):
            transfer, output = _start(group, is_homeward=is_homeward)
            del transfer, output
            torch.ones(RANKS, 2, device=GPU)
    assert not cuda.faults
