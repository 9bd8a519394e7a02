"""Records of routing: the loads, and how full the fullest rank is."""

import json
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.domain.routing_record import (
    ModelRoutingRecord,
    RoutingRecord,
    record_of,
    routing_record,
)

ROWS = [(3, 1), (2, 2), (0, 0), (4, 0)]
"""Of two ranks in four steps; the fullest has 1.5, 1, none and 2 times the mean."""


def record() -> RoutingRecord:
    return record_of(ROWS, (5, 4, 2, 1), top_k=1, num_ranks=2)


def test_quantiles_are_of_steps_with_tokens() -> None:
    found = record()
    assert (found.num_steps, found.fullest_p50, found.fullest_p99) == (4, 1.5, 2.0)
    assert found.expert_loads("f").loads == (5.0, 4.0, 2.0, 1.0)
    assert routing_record(found.text, "f") == found


def test_nothing_recorded_is_refused() -> None:
    for rows in ([], [(0, 0)]):
        with pytest.raises(InputError, match="no step was recorded"):
            record_of(rows, (0, 0), top_k=1, num_ranks=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loads": [1, 2]}, "loads must have 4 numbers"),
        ({"loads": [1, 2, 3, -1]}, "loads must have 4 numbers"),
        ({"num_ranks": 3}, "num_ranks must divide"),
        ({"num_ranks": 0}, "num_ranks must divide"),
        ({"fullest_p50": 0.5}, "from 1 to num_ranks"),
        ({"fullest_p99": 9.0}, "from 1 to num_ranks"),
        ({"schema": "moetune.plan/1"}, "schema"),
        ({"more": 1}, "more"),
    ],
)
def test_wrong_records_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        routing_record(json.dumps(json.loads(record().text) | change), "f")


def test_loads_counted_by_place_become_those_of_the_experts() -> None:
    found = record().in_order_of((2, 0, 3, 1))
    assert found.loads == (4, 1, 5, 2)
    assert record().in_order_of(()) == record()


def test_a_models_record_has_one_of_each_layer() -> None:
    whole = ModelRoutingRecord(layers=(record(), record()))
    assert routing_record(whole.text, "f") == whole
    assert routing_record(record().text, "f") == record()
    with pytest.raises(InputError, match="must have a layer of experts"):
        ModelRoutingRecord(layers=())
    with pytest.raises(InputError, match="loads must have 5 numbers"):
        routing_record(whole.text.replace('"num_experts": 4', '"num_experts": 5'), "f")
