"""Divisors, and the nearest to a number."""

from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.layout import divisors, nearest_divisors


def test_divisors_are_all_numbers_that_divide() -> None:
    for number in range(400):
        assert divisors(number) == tuple(num for num in range(1, number + 1) if number % num == 0)


def test_divisors_of_many_tokens_are_complete() -> None:
    assert divisors(2**31) == tuple(2**power for power in range(32))
    assert divisors(2**31 - 1) == (1, 2**31 - 1)
    assert divisors(65_537 * 3**2) == (1, 3, 9, 65_537, 196_611, 589_833)


@given(st.integers(1, 200), st.integers(1, 300))
def test_nearest_divisors_have_no_other_between(number: int, near: int) -> None:
    sizes = nearest_divisors(number, near)
    assert all(number % size == 0 for size in sizes)
    if number % near == 0:
        assert sizes == (near,)
    else:
        between = range(min(sizes) + 1, max(sizes)) if len(sizes) == 2 else range(number + 1, near)
        assert not [size for size in between if number % size == 0]
