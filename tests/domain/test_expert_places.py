"""Places of experts: what is a placement, and what is counted of it."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.placement import check_order, places_of
from moetune.domain.routing import ExpertLoads
from moetune.domain.routing_record import RoutingRecord

ORDER = (5, 0, 1, 2, 4, 3)


def test_places_are_by_expert() -> None:
    assert places_of(ORDER) == (1, 2, 3, 5, 4, 0)
    check_order(ORDER, 6)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ((*range(6), 0), "7 places for 6 experts"),
        ((0, 1, 2, 0, 1, 3), "no place for expert 4"),
        ((0, 1, 2), "3 places for 6 experts"),
    ],
)
def test_what_is_no_placement_is_named(places: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_order(places, 6)


def test_ranks_have_the_loads_of_their_places() -> None:
    loads = ExpertLoads(name="mine", loads=(6, 1, 1, 1, 1, 2))
    assert loads.skew_in_order(6, 1, 3) == pytest.approx(7 / 12 * 3)
    assert loads.skew_in_order(6, 1, 3, ORDER) == pytest.approx(8 / 12 * 3)
    layer = LayerShape(d_model=8, d_hidden=8, num_experts=6)
    work = Workload(
        layer=layer, world_size=3, tokens_per_rank=4, routing="6 1 1 1 1 2", placement=ORDER
    )
    assert work.local_experts == 2
    assert work.skew.mean == pytest.approx(2)


def test_a_record_of_places_is_one_of_experts() -> None:
    record = RoutingRecord(
        num_experts=6, top_k=1, num_ranks=3, num_steps=1, loads=(1, 2, 3, 4, 5, 6),
        fullest_p50=1, fullest_p99=1,
    )  # fmt: skip
    assert record.in_order_of(ORDER).loads == (2, 3, 4, 6, 5, 1)
    assert record.in_order_of(()) == record
