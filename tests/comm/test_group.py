"""Collectives and agreements of real ranks, and errors that name the collective and the rank."""

import pickle

import pytest
import torch

from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.group import OneRank
from moetune.comm.process_group import GroupRank
from moetune.domain.errors import CollectiveError
from tests.comm.workers import a_rank_dies, a_watched_exchange_fails, all_checks
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_collective_and_agreement_among_ranks(num_ranks: int) -> None:
    assert run_ranks(all_checks, num_ranks) == [""] * num_ranks


def test_a_rank_that_died_is_named_with_collective_sizes_group_and_rank() -> None:
    assert run_ranks(a_rank_dies, 2) == ["", "the rank was killed or hung"]


def test_a_future_of_a_failed_exchange_fails() -> None:
    assert run_ranks(a_watched_exchange_fails, 2) == ["", "the rank was killed or hung"]


def test_one_rank_needs_no_process_group_and_does_what_several_do() -> None:
    group = communicator_of(None)
    assert isinstance(group, OneRank)
    assert isinstance(new_communicator(purpose="all"), OneRank)
    assert not torch.distributed.is_initialized()


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
