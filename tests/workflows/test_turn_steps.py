"""Blocks that a profile measures while two batches take turns, on real ranks."""

import pytest

from tests.ranks import run_ranks
from tests.workflows import turn_workers

pytestmark = pytest.mark.dist


def test_blocks_in_turns_have_the_gradients_of_one_batch_after_the_other() -> None:
    assert run_ranks(turn_workers.take_turns, 2) == [""] * 2


def test_their_tokens_choose_all_experts_about_alike() -> None:
    assert run_ranks(turn_workers.balance, 2) == [""] * 2


def test_halves_of_positions_have_the_gradients_of_whole_sequences() -> None:
    assert run_ranks(turn_workers.halves_take_turns, 2) == [""] * 2
