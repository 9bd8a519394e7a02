"""Ranks with different plan files: the same error on all of them, and none waits."""

from pathlib import Path

import pytest

from moetune.runtime.plans.book import described
from tests.ranks import run_ranks
from tests.runtime import mismatch_workers as workers

PASSED = ["", ""]
SECOND_SAYS = [
    ("same question", f"plan {workers.PLAN.id[:6]} with 2 and 1 chunks (digest "),
    ("other question", f"plan {workers.OTHER_QUESTION.id[:6]} with 4 and 3 chunks (digest "),
]


@pytest.mark.parametrize(
    ("second", "says"),
    [*SECOND_SAYS, ("none", "error: plan "), ("cut short", "error: "), ("other layer", "error: ")],
)
def test_layers_with_different_plan_files_raise_on_all_ranks(
    tmp_path: Path, second: str, says: str
) -> None:
    workers.write(tmp_path, second)
    assert run_ranks(workers.layers_differ, 2, tmp_path, says) == PASSED


def test_layers_with_equal_plans_in_other_files_run_them(tmp_path: Path) -> None:
    workers.write(tmp_path, "spaces")
    assert run_ranks(workers.layers_agree, 2, tmp_path) == PASSED


def test_a_plan_that_no_rank_has_is_each_ones_own_error(tmp_path: Path) -> None:
    assert run_ranks(workers.layers_have_no_plan, 2, tmp_path) == PASSED


def test_layers_whose_parameters_are_drawn_later_compare_their_plans_then(tmp_path: Path) -> None:
    workers.write(tmp_path, "same question")
    assert run_ranks(workers.layers_made_later_differ, 2, tmp_path) == PASSED


def test_different_plans_of_programs_raise_on_all_ranks() -> None:
    assert run_ranks(workers.plans_of_programs_differ, 2) == PASSED


@pytest.mark.parametrize("second", ["other question", "none"])
def test_a_shared_book_is_the_first_ranks(tmp_path: Path, second: str) -> None:
    workers.write(tmp_path, second)
    assert run_ranks(workers.shared_books_are_the_first_ranks, 2, tmp_path) == PASSED


def test_of_many_plans_some_are_named_and_the_others_counted() -> None:
    words = described([workers.PLAN] * 12, "0" * 64)
    assert words.count(workers.PLAN.id[:6]) == 3
    assert words.endswith(" and 9 more (digest 000000000000)")
