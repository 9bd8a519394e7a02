"""Places of experts and their replicas: what is a placement, and what is counted of it."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.placement import (
    EMPTY,
    PlacementChoice,
    ReplicaChoice,
    busiest_sum,
    check_places,
    has_replicas,
    most_replicas,
    places_of,
    replicas_of,
)
from moetune.domain.routing import ExpertLoads
from moetune.domain.routing_record import RoutingRecord

THREE = (0, 1, 2, 3, 0, 4, 0, 5, EMPTY)
"""Six experts on three ranks, the first on all of them."""


def test_places_and_replicas_are_by_expert() -> None:
    assert replicas_of(THREE) == ((0, 4, 6), (1,), (2,), (3,), (5,), (7,))
    assert places_of(THREE) == (0, 1, 2, 3, 5, 7)
    assert has_replicas(THREE)
    assert not has_replicas((2, 0, 1, EMPTY))
    check_places(THREE, 6, 3)
    check_places((5, 4, 3, 2, 1, 0), 6, 3)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ((*range(6), 0), "7 places on 3 ranks"),
        ((0, 1, 2, 0, 1, 3, 0, 4, 4), "no place for expert 5"),
        ((0, 1, 2, 0, 6, 3, 0, 4, 5), "a place for expert 6 of 6"),
        ((0, 0, 2, 1, 6 - 5 - 1, 3, 0, 4, 5), "expert 0 more than once on rank 0"),
        (tuple(range(6)) * 3, "6 places on each rank for 6 experts"),
        ((0, 1, 2), "3 places for 6 experts"),
    ],
)
def test_what_is_no_placement_is_named(places: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_places(places, 6, 3)


def test_the_busiest_rank_sums_parts_of_its_replicas() -> None:
    """Each of three sends two thirds twice, a rank with two experts of two one for each."""
    assert busiest_sum(THREE, 3) == pytest.approx(4 / 3)
    assert most_replicas(THREE, 3) == 1
    assert busiest_sum((0, 1, 2, 0, 1, 3), 2) == pytest.approx(2)
    assert most_replicas((0, 1, 2, 0, 1, 3), 2) == 2
    assert busiest_sum((), 3) == 0 == busiest_sum((2, 0, 1), 3)
    assert most_replicas((), 3) == 0


def test_replicas_have_equal_parts_of_a_load() -> None:
    loads = ExpertLoads(name="mine", loads=(6, 1, 1, 1, 1, 2))
    assert loads.skew_in_order(6, 1, 3) == pytest.approx(7 / 12 * 3)
    assert loads.skew_in_order(6, 1, 3, THREE) == pytest.approx(4 / 12 * 3)
    layer = LayerShape(d_model=8, d_hidden=8, num_experts=6)
    work = Workload(
        layer=layer, world_size=3, tokens_per_rank=4, routing="6 1 1 1 1 2", placement=THREE
    )
    assert work.local_experts == 3
    assert work.skew.mean == pytest.approx(1)
    assert work.local_replicas == 1
    assert work.summed_experts == pytest.approx(4 / 3)


def test_a_record_of_places_is_one_of_experts() -> None:
    record = RoutingRecord(
        num_experts=9, top_k=1, num_ranks=3, num_steps=1, loads=(1, 2, 3, 4, 5, 6, 7, 8, 0),
        fullest_p50=1, fullest_p99=1,
    )  # fmt: skip
    found = record.in_order_of(THREE)
    assert found.loads == (1 + 5 + 7, 2, 3, 4, 6, 8)
    assert found.num_experts == 6


def test_a_choice_counts_its_replicas() -> None:
    one = ReplicaChoice(
        is_taken=True, num_replicas=1, added_places=1, skew=1, step_seconds=1, sum_seconds=0
    )
    choice = PlacementChoice(
        experts=THREE, natural_skew=2, placed_skew=2, least_skew=2, natural_step_seconds=2,
        placed_step_seconds=2, why="", replicas=one,
    )  # fmt: skip
    assert choice.has_replicas
    assert choice.replica_words == "1 replica of hot ones"
    with pytest.raises(InputError, match="each expert once"):
        PlacementChoice(
            experts=THREE, natural_skew=2, placed_skew=2, least_skew=2, natural_step_seconds=2,
            placed_step_seconds=2, why="",
        )  # fmt: skip
