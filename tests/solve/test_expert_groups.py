"""Equal groups of experts, against every partition there is."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.solve.layer.placed import group_experts, least_fullest, place_experts

WORST = 4 / 3
"""Of longest-first with equal numbers (Babel, Kellerer and Kotov 1998)."""
Groups = tuple[tuple[int, ...], ...]


def partitions(experts: tuple[int, ...], each: int) -> Iterator[Groups]:
    """Yield every way to cut experts into groups of so many."""
    if not experts:
        yield ()
        return
    first, *others = experts
    for peers in combinations(others, each - 1):
        rest = tuple(expert for expert in others if expert not in peers)
        for groups in partitions(rest, each):
            yield ((first, *peers), *groups)


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
def test_the_fullest_group_is_near_that_of_the_best_partition(
    case: tuple[list[float], int],
) -> None:
    loads, num_groups = case
    grouped = group_experts(loads, num_groups)
    each, experts = len(loads) // num_groups, tuple(range(len(loads)))
    assert sorted(expert for group in grouped for expert in group) == list(experts)
    assert {len(group) for group in grouped} == {each}
    least = min(fullest(loads, groups) for groups in partitions(experts, each))
    assert least_fullest(loads, num_groups) <= least + 1e-9
    assert least - 1e-9 <= fullest(loads, grouped) <= WORST * least + 1e-9


@pytest.mark.parametrize(("experts", "ranks"), [(128, 8), (256, 64), (384, 2), (512, 64)])
def test_many_experts_come_near_their_bound(experts: int, ranks: int) -> None:
    loads = [1 / (1 + (7 * expert) % experts) ** 0.7 for expert in range(experts)]
    grouped = group_experts(loads, ranks)
    assert fullest(loads, grouped) <= 1.001 * least_fullest(loads, ranks)
    assert fullest(loads, grouped) < fullest(loads, natural(experts, ranks))
    assert grouped == group_experts(loads, ranks)


def natural(experts: int, ranks: int) -> Groups:
    each = experts // ranks
    return tuple(tuple(range(low, low + each)) for low in range(0, experts, each))


def test_experts_keep_their_order_where_no_partition_is_better() -> None:
    shares = [share / 25 for share in (5, 6, 1, 8, 4, 1)]  # the first three have 12, the others 13
    least = min(
        max(sum(shares[expert] for expert in group) for group in groups)
        for groups in partitions(tuple(range(6)), 3)
    )
    placed = place_experts(shares, 2, natural_skew=2 * 13 / 25)
    assert 2 * least == pytest.approx(placed.placed_skew)
    assert not placed.experts
