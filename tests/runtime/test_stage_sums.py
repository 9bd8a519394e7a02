"""Stages' sums over replicas, with and without ZeRO, end where one process ends."""

import pytest

from moetune.domain.training import ZeroStage
from tests.ranks import run_ranks
from tests.runtime import sums_workers as workers

ZEROS = pytest.mark.parametrize("zero", [0, 1, 3])


@pytest.mark.dist
def test_a_rank_that_leaves_a_block_out_has_the_right_sums() -> None:
    assert run_ranks(workers.unused_parameters_count_as_zeros, 2) == ["", ""]


@pytest.mark.dist
@ZEROS
def test_a_step_behind_a_failed_one_has_its_own_sums(zero: ZeroStage) -> None:
    assert run_ranks(workers.a_step_behind_a_failed_one_has_its_own_sums, 2, zero) == ["", ""]


@pytest.mark.dist
@ZEROS
def test_an_evaluation_changes_no_step_behind_it(zero: ZeroStage) -> None:
    assert run_ranks(workers.an_evaluation_changes_no_step, 2, zero) == ["", ""]
