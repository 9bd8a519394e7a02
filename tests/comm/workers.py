"""What ranks do in the tests of the communicator: every check is called by all of them."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moetune.comm.agree import (
    Opening,
    agree,
    decide_on_first,
    few_values,
    first_text,
    largest,
    vote,
)
from moetune.comm.gloo import communicator_of, group_of_this_rank, new_communicator
from moetune.comm.group import Communicator
from moetune.domain.errors import CollectiveError, InputError, RankMismatchError

CPU = torch.device("cpu")
Check = Callable[[Communicator], None]


def all_checks() -> None:
    communicator = communicator_of(None)
    failures = []
    for check in (*ON_ANY_RANKS, *AMONG_SEVERAL):
        try:
            check(communicator)
        except BaseException:  # noqa: BLE001 - the other ranks go on to the next check, too
            failures.append(f"{check.__name__}: {traceback.format_exc()}")
    assert not failures, "\n".join(failures)


def rows_between(source: int, target: int, turn: int) -> torch.Tensor:
    """Return what a rank sends another in an exchange: of many sizes, none among them."""
    num_rows = (source + 2 * target + turn) % 3
    return torch.full((num_rows, 2), 100.0 * source + target + 0.01 * turn)


def an_all_to_all_brings_rows(group: Communicator) -> None:
    ranks, issued = range(group.num_ranks), []
    for turn in range(4):
        leaving = [rows_between(group.rank, other, turn) for other in ranks]
        expected = [rows_between(other, group.rank, turn) for other in ranks]
        output = torch.full((sum(map(len, expected)), 2), -1.0)
        transfer = group.all_to_all(
            output, torch.cat(leaving), [*map(len, expected)], [*map(len, leaving)],
            "an exchange",
        )  # fmt: skip
        issued.append((transfer, output, torch.cat(expected)))
    for transfer, output, wanted in issued:
        transfer.wait()
        assert torch.equal(output, wanted)


def equal_parts_need_no_splits(group: Communicator) -> None:
    sent = torch.arange(2 * group.num_ranks) + 100 * group.rank
    wanted = [
        100 * other + 2 * group.rank + place for other in range(group.num_ranks) for place in (0, 1)
    ]
    received = torch.zeros_like(sent)
    group.all_to_all(received, sent, None, None, "equal parts").wait()
    assert received.tolist() == wanted
    assert group.all_to_all_blocks(sent.view(-1, 2), "blocks").flatten().tolist() == wanted


def all_reduce_adds_up_and_finds_the_largest(group: Communicator) -> None:
    values = torch.tensor([group.rank, -group.rank], dtype=torch.int64)
    highest = values.clone()
    transfers = [group.all_reduce(values, "a sum"), group.all_reduce(highest, "a max", op="max")]
    for transfer in transfers:
        transfer.wait()
    total = sum(range(group.num_ranks))
    assert values.tolist() == [total, -total]
    assert highest.tolist() == [group.num_ranks - 1, 0]
    mine = torch.tensor(0.5 + group.rank, dtype=torch.float64)
    assert float(group.all_reduce_values(mine, "a sum")) == total + 0.5 * group.num_ranks
    assert float(mine) == 0.5 + group.rank


def sums_are_rounded_once(group: Communicator) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        mine = torch.full((16,), 0.5 if group.rank else 256.0, dtype=dtype)
        sums, means = [mine.clone() for _ in range(20)], mine.clone()
        group.sum_in_place(sums, "sums")
        group.sum_in_place([means], "means", divisor=group.num_ranks)
        total = torch.full((16,), 256.0 + 0.5 * (group.num_ranks - 1), dtype=torch.float64)
        assert all(torch.equal(each, total.to(dtype)) for each in sums)
        assert torch.equal(means, (total / group.num_ranks).to(dtype))


def all_gather_moves_every_dtype(group: Communicator) -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.int8):
        values = torch.tensor([group.rank % 2, 1], dtype=dtype)
        gathered = torch.empty(group.num_ranks, 2, dtype=dtype)
        group.all_gather(gathered, values, "a chunk").wait()
        wanted = [[rank % 2, 1] for rank in range(group.num_ranks)]
        assert torch.equal(gathered, torch.tensor(wanted, dtype=dtype))
    assert group.all_gather_values(torch.tensor(group.rank), "ranks").tolist() == [
        *range(group.num_ranks)
    ]


def reduce_scatter_adds_up_shards(group: Communicator) -> None:
    total_ranks = sum(range(group.num_ranks))
    blocks = torch.arange(group.num_ranks, dtype=torch.float32) + group.rank
    tensor = torch.empty(1)
    group.reduce_scatter(tensor, blocks, "equal shards").wait()
    assert tensor.item() == group.rank * group.num_ranks + total_ranks


def broadcast_comes_from_the_first(group: Communicator) -> None:
    values = torch.full((3,), group.rank)
    group.broadcast(values, "a broadcast").wait()
    assert values.tolist() == [0] * 3


def neighbours_send_and_receive_at_once(group: Communicator) -> None:
    neighbours = [rank for rank in (group.rank - 1, group.rank + 1) if 0 <= rank < group.num_ranks]
    to = {rank: torch.tensor([group.rank, rank]) for rank in neighbours}
    source = {rank: torch.zeros(2, dtype=torch.int64) for rank in neighbours}
    group.send_receive(to, source, "activations and gradients").wait()
    assert {rank: got.tolist() for rank, got in source.items()} == {
        rank: [rank, group.rank] for rank in neighbours
    }


def objects_travel(group: Communicator) -> None:
    mine = None if group.rank == 1 else {"rank": group.rank, "text": "x" * (1 + group.rank)}
    everywhere = group.all_gather_object(mine, "objects")
    assert [value and value["rank"] for value in everywhere] == [
        None if rank == 1 else rank for rank in range(group.num_ranks)
    ]
    assert group.broadcast_object(("from", group.rank), "an object") == ("from", 0)
    group.barrier("a pause")


def a_future_completes_with_its_transfer(group: Communicator) -> None:
    rows = torch.full((group.num_ranks, 1), float(group.rank))
    output = torch.empty_like(rows)
    transfer = group.all_to_all(output, rows, None, None, "an exchange")
    future = transfer.future()
    assert future is not None
    future.wait()
    transfer.wait()
    assert output.flatten().tolist() == [*range(group.num_ranks)]
    total = torch.ones(1)
    transfer = group.all_reduce(total, "a sum")
    future = transfer.future()
    assert future is not None
    future.wait()
    transfer.wait()
    assert total.item() == group.num_ranks


def new_groups_have_all_ranks_or_this(group: Communicator) -> None:
    """The world is bound to a device, as NCCL's: a rank's own group is not cut out of it."""
    assert new_communicator(purpose="all", timeout_seconds=30).members == group.members
    world: Any = dist.group.WORLD
    device = world.bound_device_id = torch.device("cpu", 0)
    if dist.get_rank() == 0:
        alone: Any = group_of_this_rank("a rank")
        assert dist.get_process_group_ranks(alone) == [0]
        assert alone.bound_device_id is None
    assert world.bound_device_id == device
    world.bound_device_id = None


def a_wrong_size_is_refused_before_it_travels(group: Communicator) -> None:
    # A group of its own: gloo promises nothing of one in which a collective has failed.
    separate = new_communicator(purpose="a failure")
    rows = torch.zeros(3, 2, dtype=torch.bfloat16)
    sent, splits = rows.new_zeros(9, 2), [1] * group.num_ranks
    with pytest.raises(CollectiveError) as failure:
        separate.all_to_all(rows, sent, splits, splits, "the dispatch of chunk 2 of 4").wait()
    text = str(failure.value)
    assert text.startswith(f"the dispatch of chunk 2 of 4 failed on rank {group.rank} of ")
    members = f"ranks 0 to {group.num_ranks - 1}"
    assert f"all_to_all of 3x2 bfloat16, 9x2 bfloat16 among {members}" in text
    group.barrier("the ranks after it")


def agreed_tokens(group: Communicator, opening: Opening) -> tuple[int, ...]:
    rows = group.all_gather_values(few_values(opening.values, CPU), "openings")
    return opening.agree(rows.tolist(), group)


def equal_signatures_agree(group: Communicator) -> None:
    opening = Opening(num_tokens=3 + group.rank, signature="same", problem="")
    tokens = agreed_tokens(group, opening)
    assert tokens == tuple(3 + rank for rank in range(group.num_ranks))
    assert agree(group, lambda: group.rank, lambda _: ["abc"], "the plans") == group.rank


def unequal_signatures_raise_on_all(group: Communicator) -> None:
    last = group.num_ranks - 1
    signature = "degree 3" if group.rank == last else "degree 2"
    with pytest.raises(RankMismatchError) as failure:
        agreed_tokens(group, Opening(num_tokens=1, signature=signature, problem=""))
    assert "rank 0: degree 2" in str(failure.value)
    assert f"rank {last}: degree 3" in str(failure.value)
    with pytest.raises(RankMismatchError, match="the ranks disagree on the plans\n  rank 0: of 0"):
        agree(group, lambda: group.rank, lambda rank: ["same", f"of {rank}"], "the plans")


def problem_of_a_rank_raises_on_all(group: Communicator) -> None:
    problem = "x has 7 columns" if group.rank == 1 else ""
    with pytest.raises(RankMismatchError, match="rank 1: error: x has 7 columns"):
        agreed_tokens(group, Opening(num_tokens=1, signature="same", problem=problem))
    with pytest.raises(ValueError if group.rank == 1 else RankMismatchError, match="not convert"):
        agree(group, lambda: float("-" if group.rank == 1 else "1"), lambda _: [], "the numbers")


def the_first_decides(group: Communicator) -> None:
    called = []

    def decide() -> tuple[str, None]:
        called.append(group.rank)
        return "plans", None

    assert decide_on_first(group, decide, "the plans") == ("plans", None)
    assert called == ([0] if group.rank == 0 else [])
    assert decide_on_first(group, lambda: None, "nothing") is None


def the_firsts_error_is_everyones(group: Communicator) -> None:
    def decide() -> str:
        raise InputError("no such file", "write it")

    with pytest.raises(InputError, match="no such file\n  write it"):
        decide_on_first(group, decide, "the plans")


def ranks_vote_and_compare(group: Communicator) -> None:
    somebody, nobody = (
        vote(group, wish, "a vote") for wish in (group.rank == 1, group.rank > group.num_ranks)
    )
    assert (somebody(), nobody()) == (True, False)
    assert largest(group, [group.rank, -group.rank], "the slowest") == (group.num_ranks - 1, 0.0)
    text = f"rank {group.rank}" if group.rank else ""
    assert first_text(group, text, "reasons") == "rank 1"
    assert first_text(group, "", "reasons") == ""


ON_ANY_RANKS: tuple[Check, ...] = (
    an_all_to_all_brings_rows,
    equal_parts_need_no_splits,
    all_reduce_adds_up_and_finds_the_largest,
    sums_are_rounded_once,
    all_gather_moves_every_dtype,
    reduce_scatter_adds_up_shards,
    broadcast_comes_from_the_first,
    neighbours_send_and_receive_at_once,
    objects_travel,
    equal_signatures_agree,
    the_first_decides,
    the_firsts_error_is_everyones,
)
AMONG_SEVERAL: tuple[Check, ...] = (
    a_future_completes_with_its_transfer,
    new_groups_have_all_ranks_or_this,
    a_wrong_size_is_refused_before_it_travels,
    unequal_signatures_raise_on_all,
    problem_of_a_rank_raises_on_all,
    ranks_vote_and_compare,
)


def a_rank_dies() -> None:
    """Let the last rank die with every kind of exchange under way on the first."""
    group = communicator_of(None)
    group.barrier("the start")
    if group.rank == group.num_ranks - 1:
        os._exit(1)
    rows = torch.zeros(2 * group.num_ranks, 3)
    for collective, attempt in (
        ("all_reduce of 4x3 float32", lambda: group.all_reduce(rows, "a death").wait()),
        ("all_to_all of 4x3 float32, 4x3 float32", lambda: lone(group, rows)),
        ("broadcast_object", lambda: decide_on_first(group, lambda: 1, "a death")),
        ("barrier", lambda: group.barrier("a death")),
    ):
        with pytest.raises(CollectiveError) as failure:
            attempt()
        text = str(failure.value)
        assert text.startswith("a death failed on rank 0 of 2: "), text
        assert f"({collective} among ranks 0 to 1 of the world)" in text
        assert "\n  a rank died" in text
        assert failure.value.__cause__ is not None


def lone(group: Communicator, rows: torch.Tensor) -> None:
    group.all_to_all(torch.zeros_like(rows), rows, None, None, "a death").wait()


def a_watched_exchange_fails() -> None:
    """Let a rank die while a thread waits for the other's exchange."""
    group = communicator_of(None)
    group.barrier("the start")
    if group.rank == 1:
        os._exit(1)
    rows = torch.zeros(2, 1)
    try:
        transfer = group.all_to_all(torch.zeros(2, 1), rows, None, None, "a death")
    except CollectiveError:
        return  # gloo saw the death before it took the rows
    future = transfer.future()
    assert future is not None
    with pytest.raises(RuntimeError):
        future.wait()
    with pytest.raises(CollectiveError, match="a death failed on rank 0 of 2"):
        transfer.wait()
