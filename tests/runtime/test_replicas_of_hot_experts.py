"""Layers whose hot experts have replicas, on real ranks, against dense ones and one process."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runtime import replica_workers as workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "worker",
    [
        workers.numbers_are_those_of_a_dense_layer,
        workers.replicas_share_the_rows,
        workers.replicas_stay_equal,
        workers.clipping_counts_each_expert_once,
    ],
)
def test_replicas_on_ranks(worker: workers.Worker, ranks: int) -> None:
    assert run_ranks(worker, ranks) == [""] * ranks


def test_checkpoints_move_between_replicas_and_none(tmp_path: Path) -> None:
    assert run_ranks(workers.checkpoints_move_between_replicas_and_none, 2, tmp_path) == [""] * 2
    assert run_ranks(workers.load_what_two_saved, 4, tmp_path) == [""] * 4


@pytest.mark.parametrize(
    "worker",
    [
        workers.states_keep_their_rules,
        workers.frozen_experts_have_no_sums,
        workers.what_does_not_go_with_replicas_is_refused,
    ],
)
def test_replicas_on_two_ranks(worker: workers.Worker) -> None:
    assert run_ranks(worker, 2) == [""] * 2
