"""Equal groups of experts, against every partition there is."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.solve.layer import expert_groups
from moetune.solve.layer.expert_groups import group_experts, least_fullest

Groups = tuple[tuple[int, ...], ...]


def partitions(experts: tuple[int, ...], each: int) -> Iterator[Groups]:
    """Yield every way to cut experts into groups of so many."""
    if not experts:
        yield ()
        return
    first, *others = experts
    for beside in combinations(others, each - 1):
        rest = tuple(one for one in others if one not in beside)
        for groups in partitions(rest, each):
            yield ((first, *beside), *groups)


def fullest(loads: Sequence[float], groups: Groups) -> float:
    return max(sum(loads[expert] for expert in group) for group in groups)


@st.composite
def loads_and_groups(draw: st.DrawFn) -> tuple[list[float], int]:
    num_groups = draw(st.integers(1, 5))
    each = draw(st.integers(1, 10 // num_groups))
    some = st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.sampled_from([1.0, 2.0, 10.0]))
    size = num_groups * each
    return draw(st.lists(some, min_size=size, max_size=size)), num_groups


@given(case=loads_and_groups())
@settings(deadline=None, max_examples=150)
def test_no_partition_has_a_less_full_group(case: tuple[list[float], int]) -> None:
    loads, num_groups = case
    found = group_experts(loads, num_groups)
    each, experts = len(loads) // num_groups, tuple(range(len(loads)))
    assert sorted(expert for group in found.groups for expert in group) == list(experts)
    assert {len(group) for group in found.groups} == {each}
    least = min(fullest(loads, groups) for groups in partitions(experts, each))
    assert found.fullest == pytest.approx(fullest(loads, found.groups), abs=1e-12)
    assert found.fullest == pytest.approx(least, abs=1e-9)
    assert found.least == pytest.approx(least, abs=1e-9)


@given(case=loads_and_groups(), trials=st.integers(1, 30))
@settings(deadline=None, max_examples=50)
def test_a_search_that_was_cut_short_has_a_bound_that_holds(
    case: tuple[list[float], int], trials: int
) -> None:
    loads, num_groups = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_groups, "MOST_TRIALS", trials)
        found = group_experts(loads, num_groups)
    every = partitions(tuple(range(len(loads))), len(loads) // num_groups)
    least = min(fullest(loads, groups) for groups in every)
    assert found.least - 1e-9 <= least <= found.fullest + 1e-9


@pytest.mark.parametrize(("experts", "ranks"), [(128, 8), (256, 64), (384, 2), (512, 64)])
def test_many_experts_come_near_their_bound(experts: int, ranks: int) -> None:
    loads = [1 / (1 + (7 * expert) % experts) ** 0.7 for expert in range(experts)]
    found = group_experts(loads, ranks)
    assert found.fullest <= 1.001 * found.least
    assert found.fullest < fullest(loads, natural(experts, ranks))
    assert found == group_experts(loads, ranks)


def natural(experts: int, ranks: int) -> Groups:
    each = experts // ranks
    return tuple(tuple(range(low, low + each)) for low in range(0, experts, each))


def test_equal_loads_keep_neighbours_apart_in_ascending_groups() -> None:
    found = group_experts([1.0] * 6, 3)
    assert found.groups == tuple(sorted(found.groups))
    assert found.fullest == found.least == 2.0


SWAPS_END_ABOVE = [11, 11, 10, 10, 9, 9, 9, 7, 2]
"""Three groups with 28 at most after the longest first and swaps; 27 is possible."""


def test_the_search_finds_what_swaps_do_not() -> None:
    found = group_experts(SWAPS_END_ABOVE, 3)
    assert found.fullest == found.least == 27


def test_what_was_begun_before_a_better_end_is_not_better() -> None:
    loads = [27, 11, 27, 11, 4, 16, 5, 1, 21, 16, 25, 10]
    found = group_experts(loads, 4)
    every = partitions(tuple(range(12)), 3)
    assert found.fullest == min(fullest(loads, groups) for groups in every)


def test_a_short_search_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "MOST_TRIALS", 3)
    found = group_experts(SWAPS_END_ABOVE, 3)
    assert (found.fullest, found.least) == (28, 26)


def test_swaps_have_the_last_word_on_very_many_experts() -> None:
    loads = [1.0 + (7 * expert % 300) ** 2 for expert in range(300)]
    found = group_experts(loads, 3)
    assert found.least < found.fullest <= 1.001 * found.least


def test_a_rank_for_each_expert_has_the_largest_load() -> None:
    found = group_experts([3.0, 1.0, 2.0, 2.0], 4)
    assert found.groups == ((0,), (1,), (2,), (3,))
    assert found.fullest == found.least == 3.0


@given(case=loads_and_groups(), tolerance=st.sampled_from([0.0, 0.05, 0.5]))
@settings(deadline=None, max_examples=100)
def test_groups_within_the_tolerance_are_enough_and_bounds_hold(
    case: tuple[list[float], int], tolerance: float
) -> None:
    loads, num_groups = case
    found = group_experts(loads, num_groups, tolerance=tolerance)
    each, experts = len(loads) // num_groups, tuple(range(len(loads)))
    assert sorted(expert for group in found.groups for expert in group) == list(experts)
    least = min(fullest(loads, groups) for groups in partitions(experts, each))
    bound = least_fullest(loads, num_groups)
    assert bound <= least + 1e-9
    assert found.least <= least + 1e-9
    assert found.fullest <= max(least, bound * (1 + tolerance)) + 1e-9


def test_close_groups_are_not_swapped_and_their_bound_is_not_called_reached() -> None:
    near = group_experts(SWAPS_END_ABOVE, 3, tolerance=0.1)
    assert (near.fullest, near.least) == (28, 26)
    assert group_experts(SWAPS_END_ABOVE, 3, tolerance=0.05).fullest == 27
    assert group_experts(SWAPS_END_ABOVE, 3, most_trials=3).fullest == 28
