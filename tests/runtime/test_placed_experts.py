"""Layers whose experts a plan has placed, on real ranks, against the natural order."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runtime import placed_workers as workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers_are_those_of_the_natural_order(ranks: int) -> None:
    done = run_ranks(workers.numbers_are_those_of_the_natural_order, ranks)
    assert done == [""] * ranks


def test_checkpoints_move_between_placements_and_ranks(tmp_path: Path) -> None:
    assert run_ranks(workers.checkpoints_move_between_placements, 2, tmp_path) == [""] * 2
    assert run_ranks(workers.load_what_two_saved, 4, tmp_path) == [""] * 4


@pytest.mark.parametrize(
    ("worker", "ranks"),
    [
        (workers.states_keep_their_rules, 2),
        (workers.a_record_has_the_experts_own_numbers, 2),
        (workers.plans_place_experts, 2),
        (workers.ranks_that_differ_raise_the_same, 2),
        (workers.what_writes_checkpoints_of_its_own_is_refused, 2),
        (workers.replicas_have_the_same_places, 4),
    ],
)
def test_placed_experts(worker: workers.Worker, ranks: int) -> None:
    assert run_ranks(worker, ranks) == [""] * ranks
