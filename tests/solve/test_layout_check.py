"""Layouts that cannot run are refused with sizes that can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.layout import (
    Layout,
    check_micro_batches,
    check_ranks,
    divisors,
    nearest_divisors,
)


def check(kind: ExpertParallel = "tensor", *, world_size: int = 8, **sizes: int) -> None:
    degrees = {"dp": 1, "ep": 1, "tp": 1, "pp": 1} | sizes
    check_ranks(Layout(expert_parallel=kind, **degrees), world_size)


def test_layouts_that_factor_are_taken() -> None:
    check("tensor", dp=2, tp=2, pp=2)
    check("all_to_all", dp=4, ep=2, pp=2)
    check("tensor", world_size=1)


@pytest.mark.parametrize(
    ("kind", "sizes", "what", "hint"),
    [
        ("tensor", {"tp": 2, "pp": 2}, "is 4 ranks, but there are 8", "use dp 2, or start 4"),
        ("tensor", {"world_size": 6, "tp": 2, "pp": 2}, "but there are 6", "4 ranks (dp 1) or 8"),
        ("tensor", {"world_size": 3, "tp": 2, "pp": 2}, "but there are 3", "start 4 ranks (dp 1)"),
        ("tensor", {"dp": 8, "ep": 2}, "ep (2)", "use ep 1"),
        ("all_to_all", {"dp": 4, "tp": 2}, "not available with tp (2)", "tp 1 with dp 8"),
        ("all_to_all", {"dp": 8, "ep": 3}, "does not divide by ep (3)", "use ep 2 or 4"),
        ("tensor", {"dp": 0}, "dp must be at least 1", ""),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused_with_the_nearest_that_does(
    kind: ExpertParallel, sizes: dict[str, int], what: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        check(kind, **sizes)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_divisors_are_all_numbers_that_divide() -> None:
    for number in range(400):
        assert divisors(number) == tuple(one for one in range(1, number + 1) if number % one == 0)


def test_divisors_of_many_tokens_are_all_found() -> None:
    assert divisors(2**31) == tuple(2**power for power in range(32))
    assert divisors(2**31 - 1) == (1, 2**31 - 1)
    assert divisors(65_537 * 3**2) == (1, 3, 9, 65_537, 196_611, 589_833)


@given(st.integers(1, 200), st.integers(1, 300))
def test_nearest_divisors_have_no_other_between(number: int, near: int) -> None:
    found = nearest_divisors(number, near)
    assert all(number % size == 0 for size in found)
    if number % near == 0:
        assert found == (near,)
    else:
        between = range(min(found) + 1, max(found)) if len(found) == 2 else range(number + 1, near)
        assert not [size for size in between if number % size == 0]


@pytest.mark.parametrize(
    ("micro_batches", "sequences", "pp", "stages_per_rank", "hint"),
    [
        (1, 8, 2, 1, "use 2 micro-batches"),
        (3, 8, 2, 1, "use 2 or 4 micro-batches"),
        (9, 8, 2, 1, "use 8 micro-batches"),
        (0, 8, 1, 1, "use 1 micro-batches"),
        (5, 30, 2, 2, "use 3 or 6 micro-batches"),
        (2, 2, 4, 1, "a multiple of 4 sequences"),
    ],
)
def test_micro_batches_that_the_schedule_cannot_run_are_refused(
    micro_batches: int, sequences: int, pp: int, stages_per_rank: int, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_micro_batches(
            micro_batches, num_sequences=sequences, pp=pp, stages_per_rank=stages_per_rank
        )
    assert hint in caught.value.hint


def test_micro_batches_that_the_schedules_run_are_taken() -> None:
    check_micro_batches(4, num_sequences=8, pp=4)
    check_micro_batches(2, num_sequences=8, pp=4, stages_per_rank=2)
