"""Collectives and agreements of real ranks, and errors that name the collective and the rank."""

import pickle

import pytest
import torch

from moetune.comm.agree import (
    Opening,
    agree,
    agree_on_tokens,
    decide_on_first,
    first_text,
    largest,
    vote,
)
from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.group import OneRank
from moetune.comm.transfer import GroupRank
from moetune.domain.errors import CollectiveError, InputError
from tests.comm.workers import (
    CPU,
    a_member_does_not_come,
    a_rank_dies,
    a_watched_exchange_fails,
    all_checks,
    members_of_different_numbers_of_groups_meet,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_collective_and_agreement_among_ranks(num_ranks: int) -> None:
    assert run_ranks(all_checks, num_ranks) == [""] * num_ranks


def test_a_rank_that_died_is_told_with_collective_sizes_group_and_rank() -> None:
    assert run_ranks(a_rank_dies, 2) == ["", "the rank was killed or hung"]


def test_a_future_of_a_failed_exchange_fails() -> None:
    assert run_ranks(a_watched_exchange_fails, 2) == ["", "the rank was killed or hung"]


def test_ranks_that_are_in_different_numbers_of_groups_meet() -> None:
    assert run_ranks(members_of_different_numbers_of_groups_meet, 3, timeout_seconds=60) == [""] * 3


def test_a_member_that_does_not_come_is_told() -> None:
    assert run_ranks(a_member_does_not_come, 2, timeout_seconds=60) == ["", ""]


@pytest.fixture
def one() -> OneRank:
    group = communicator_of(None)
    assert isinstance(group, OneRank)
    return group


def test_one_rank_needs_no_process_group(one: OneRank) -> None:
    assert (one.rank, one.num_ranks, one.members) == (0, 1, (0,))
    assert isinstance(new_communicator(purpose="all"), OneRank)
    assert not torch.distributed.is_initialized()


def test_one_rank_keeps_its_rows(one: OneRank) -> None:
    rows = torch.arange(6.0).view(3, 2)

    for splits in ([3], None):
        output = torch.zeros_like(rows)
        one.all_to_all(output, rows, splits, splits, "an exchange", is_alone=True).wait()
        assert torch.equal(output, rows)
    gathered, total = torch.zeros(1, 3, 2), torch.zeros(3, 2)
    one.all_gather(gathered, rows, "a chunk").wait()
    one.reduce_scatter(total, [rows], "shards").wait()
    assert torch.equal(gathered[0], rows)
    assert torch.equal(total, rows)
    one.reduce_scatter(total, 2 * rows, "shards").wait()
    assert torch.equal(total, 2 * rows)
    for transfer in (one.all_reduce(total, "a sum"), one.broadcast(total, "a broadcast")):
        transfer.wait()
        assert transfer.future() is None
    assert torch.equal(total, 2 * rows)


def test_one_rank_answers_with_its_own(one: OneRank) -> None:
    rows = torch.arange(6.0).view(3, 2)

    assert one.all_to_all_blocks(rows, "blocks") is rows
    assert one.all_gather_rows(rows, [3], "rows") is rows
    assert one.all_gather_values(rows[0], "values").tolist() == [[0.0, 1.0]]
    assert one.all_reduce_values(rows, "a sum", op="max") is rows
    assert one.gather(rows, "states") == [rows]
    assert one.all_gather_object("mine", "objects") == ["mine"]
    assert one.broadcast_object("mine", "an object") == "mine"
    one.barrier("a pause")


def test_one_rank_has_nobody_to_send_to(one: OneRank) -> None:
    one.send_receive({}, {}, "nothing").wait()
    with pytest.raises(ValueError, match="no other to send to"):
        one.send(torch.zeros(1), "a send", to=1)
    with pytest.raises(ValueError, match="no other to send to"):
        one.receive(torch.zeros(1), "a receive", source=1)


def test_one_rank_agrees_with_itself(one: OneRank) -> None:
    def of_tokens(problem: str) -> tuple[tuple[int, ...], int]:
        opening = Opening(num_tokens=5, signature="s", problem=problem, note=-7)
        return agree_on_tokens(one, opening, CPU)

    assert of_tokens("") == ((5,), -7)
    with pytest.raises(InputError, match="7 columns"):
        of_tokens("x has 7 columns")
    assert agree(one, lambda: 7, lambda _: ["abc"], "the plans") == 7
    assert decide_on_first(one, lambda: "plan", "the plans") == "plan"
    assert largest(one, [2.0, 1.0], "the slowest") == (2.0, 1.0)
    assert first_text(one, "reason", "reasons") == "reason"
    assert [vote(one, wish, "a vote")() for wish in (True, False)] == [True, False]


def test_one_ranks_own_error_passes(one: OneRank) -> None:
    def decide() -> str:
        raise InputError("no such file")

    with pytest.raises(InputError, match="no such file"):
        decide_on_first(one, decide, "the plans")


@pytest.mark.parametrize(
    ("members", "spelled"),
    [
        ((4, 5, 6, 7), "ranks 4 to 7 of the world"),
        ((1, 9), "ranks 1, 9 of the world"),
        (
            tuple(range(0, 64, 2)),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, …",
        ),
    ],
)
def test_a_failure_names_its_group(members: tuple[int, ...], spelled: str) -> None:
    place = GroupRank(1, members)

    error = place.error("broadcast", "the plans", (torch.zeros(()),), RuntimeError("gone\nfar"))

    assert f"(broadcast of 1 float32 among {spelled}" in error.what
    assert error.what.startswith(f"the plans failed on rank 1 of {len(members)}: gone (")
    assert isinstance(pickle.loads(pickle.dumps(error)), CollectiveError)  # noqa: S301 - our own
    assert "RuntimeError()" in place.error("barrier", "a pause", (), RuntimeError()).what
