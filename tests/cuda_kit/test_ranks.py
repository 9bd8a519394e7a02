"""The kit finds collectives that are not waited for, and ranks that would wait for ever."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda_kit import (
    CollectiveOrderError,
    CudaFaultError,
    FakeCuda,
    Issued,
    MirrorWorld,
    check_orders,
)
from tests.cuda_kit.group import MirrorWork

GPU = torch.device("cuda", 1)
# As in the product: earlier versions of torch know only the second name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Program = Callable[[int, MirrorWorld], None]


def _logs(program: Program, num_ranks: int = 2, **options: Any) -> list[list[Issued]]:
    """Run a program on every rank, one after another."""
    logs = []
    for rank in range(num_ranks):
        with FakeCuda() as cuda:
            with MirrorWorld(cuda, rank=rank, num_ranks=num_ranks, **options) as world:
                program(rank, world)
            torch.cuda.synchronize(GPU) if cuda.is_used(GPU) else None
        logs.append(world.log)
    return logs


def _sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> MirrorWork:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert isinstance(work, MirrorWork)
    return work


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_the_result_of_a_collective_is_there_when_it_was_waited_for(device: torch.device) -> None:
    def use(waits: bool) -> Program:  # noqa: FBT001 - one of two
        def program(_: int, __: MirrorWorld) -> None:
            values = torch.ones(4, device=device)
            work = _sum(values)
            if waits:
                work.wait()
            assert (values + 1).tolist() == [3.0] * 4
            work.wait()

        return program

    check_orders(_logs(use(waits=True)))
    with pytest.raises(CudaFaultError, match=r"written by all_reduce of group 0 .* does not wait"):
        _logs(use(waits=False))


def test_a_wait_in_another_stream_orders_that_stream_alone() -> None:
    def program(_: int, __: MirrorWorld) -> None:
        values, side = torch.ones(4, device=GPU), torch.cuda.Stream(GPU)
        work = _sum(values)
        with torch.cuda.stream(side):
            work.wait()
        values.add_(1)

    with pytest.raises(CudaFaultError, match="does not wait"):
        _logs(program)


def test_a_collective_comes_after_what_its_stream_was_given() -> None:
    def program(_: int, __: MirrorWorld) -> None:
        values, side = torch.ones(4, device=GPU), torch.cuda.Stream(GPU)
        with torch.cuda.stream(side):
            _sum(values).wait()

    with pytest.raises(CudaFaultError, match="written by all_reduce"):
        _logs(program)


def test_a_work_holds_its_tensors_until_it_is_waited_for() -> None:
    def program(_: int, __: MirrorWorld) -> None:
        work = _sum(torch.ones(4, device=GPU))
        torch.ones(4, device=GPU)
        work.wait()

    check_orders(_logs(program))


def test_a_future_is_done_at_once_and_orders_by_its_wait_alone() -> None:
    def program(_: int, __: MirrorWorld) -> None:
        values = torch.ones(4, device=GPU)
        future, done = _sum(values).get_future(), []
        future.add_done_callback(lambda _: done.append(True))
        assert future.done()
        assert done == [True]
        future.wait()
        values.add_(1)

    check_orders(_logs(program))


def test_collectives_have_the_sizes_and_values_of_ranks_that_do_alike() -> None:
    def program(rank: int, _: MirrorWorld) -> None:
        values = torch.tensor([1.0, 2.0], device=GPU)
        gathered = torch.empty(4, device=GPU)
        ALL_GATHER(gathered, values)
        assert gathered.tolist() == [1.0, 2.0, 1.0, 2.0]
        part = torch.empty(1, device=GPU)
        REDUCE_SCATTER(part, values)
        assert part.tolist() == [2.0 * (rank + 1)]
        output = torch.empty(3, device=GPU)
        dist.all_to_all_single(output, gathered, [1, 2], [3, 1])
        assert output.tolist() == ([1.0, 1.0, 2.0] if rank == 0 else [2.0, 2.0, 2.0])
        dist.broadcast(values, 0)
        dist.barrier()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, "what this rank says")
        assert found == ["what this rank says"] * 2

    check_orders(_logs(program))


def test_a_group_has_the_devices_of_its_backends_alone() -> None:
    def program(_: int, __: MirrorWorld) -> None:
        assert dist.get_backend() == "nccl"
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(1))

    _logs(program, backends={"cuda": "nccl"})
    assert not dist.is_initialized()


def test_two_communicators_in_different_orders_are_a_deadlock() -> None:
    def use(orders: tuple[tuple[int, int], tuple[int, int]]) -> Program:
        def program(rank: int, _: MirrorWorld) -> None:
            groups = [dist.new_group(group_desc=name) for name in ("tokens", "chunks")]
            for number in orders[rank]:
                _sum(torch.ones(1, device=GPU), groups[number])

        return program

    check_orders(_logs(use(((0, 1), (0, 1)))))
    with pytest.raises(CollectiveOrderError, match="each of these waits for the next"):
        check_orders(_logs(use(((0, 1), (1, 0)))))


def test_on_the_host_only_a_wait_between_them_orders_two_communicators() -> None:
    def use(*, waits: bool) -> Program:
        def program(rank: int, _: MirrorWorld) -> None:
            groups = [dist.new_group(), dist.new_group()]
            works = []
            for group in groups if rank == 0 else reversed(groups):
                works.append(_sum(torch.ones(1), group))
                if waits:
                    works[-1].wait()
            for work in works:
                work.wait()

        return program

    check_orders(_logs(use(waits=False)))
    with pytest.raises(CollectiveOrderError, match="each of these waits for the next"):
        check_orders(_logs(use(waits=True)))


def test_a_circle_of_three_communicators_among_three_ranks_is_a_deadlock() -> None:
    def use(*, circle: bool) -> Program:
        def program(rank: int, _: MirrorWorld) -> None:
            pairs = [(0, 1), (1, 2), (0, 2)]
            groups = {pair: dist.new_group(list(pair)) for pair in pairs}
            mine = [pair for pair in pairs if rank in pair]
            if circle and rank == 0:
                mine.reverse()
            for pair in mine:
                _sum(torch.ones(1, device=GPU), groups[pair])

        return program

    check_orders(_logs(use(circle=False), 3))
    with pytest.raises(CollectiveOrderError, match="each of these waits for the next"):
        check_orders(_logs(use(circle=True), 3))


def _exchange(rank: int, *, batched: bool, receives_first: bool) -> None:
    mine, other = torch.ones(2, device=GPU), torch.empty(2, device=GPU)
    peer = 1 - rank
    works: list[dist.Work | None] = []
    if batched:
        ops = [dist.P2POp(dist.irecv, other, peer), dist.P2POp(dist.isend, mine, peer)]
        works += dist.batch_isend_irecv(ops)
    else:
        calls = [partial(dist.irecv, other, peer), partial(dist.isend, mine, peer)]
        works += [call() for call in (calls if receives_first else reversed(calls))]
    for work in works:
        assert work is not None
        work.wait()


def test_single_receives_before_sends_wait_for_each_other_on_a_gpu() -> None:
    def alike(rank: int, _: MirrorWorld) -> None:
        _exchange(rank, batched=False, receives_first=True)

    def in_turn(rank: int, _: MirrorWorld) -> None:
        _exchange(rank, batched=False, receives_first=rank == 0)

    def batched(rank: int, _: MirrorWorld) -> None:
        _exchange(rank, batched=True, receives_first=True)

    with pytest.raises(
        CollectiveOrderError, match=r"message 0 from rank 1 to 0[\s\S]*from rank 0 to 1"
    ):
        check_orders(_logs(alike))
    check_orders(_logs(in_turn))
    check_orders(_logs(batched))


def test_a_rank_that_leaves_a_collective_out_or_issues_another_is_found() -> None:
    def leaves_out(rank: int, _: MirrorWorld) -> None:
        if rank == 0:
            _sum(torch.ones(1, device=GPU))

    def another(rank: int, _: MirrorWorld) -> None:
        _sum(torch.ones(1, dtype=(torch.float32, torch.float64)[rank], device=GPU))

    with pytest.raises(CollectiveOrderError, match=r"ranks \[1\] never issue collective 0"):
        check_orders(_logs(leaves_out))
    with pytest.raises(CollectiveOrderError, match=r"disagree on collective 0 .*float32.*float64"):
        check_orders(_logs(another))
