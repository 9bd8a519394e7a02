"""Records of routing, of a layer and of each layer of a model: how full the fullest rank is."""

import json
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.domain.routing import NATURAL, ExpertLoads
from moetune.domain.routing_record import (
    ModelRoutingRecord,
    RecordedLayer,
    RecordedLayers,
    RoutingRecord,
    record_of,
    routing_record,
)
from moetune.domain.training import TrainingJob
from moetune.huggingface.registry import named_model

ROWS = [(3, 1), (2, 2), (0, 0), (4, 0)]
"""Of two ranks in four steps; the fullest has 1.5, 1, none and 2 times the mean."""


def record() -> RoutingRecord:
    return record_of(ROWS, (5, 4, 2, 1), top_k=1, num_ranks=2)


def test_quantiles_are_of_steps_with_tokens() -> None:
    routing = record()
    assert (routing.num_steps, routing.fullest_p50, routing.fullest_p99) == (4, 1.5, 2.0)
    assert routing.expert_loads("f").loads == (5.0, 4.0, 2.0, 1.0)
    assert routing_record(routing.text, "f") == routing


def test_nothing_recorded_is_refused() -> None:
    for rows in ([], [(0, 0)]):
        with pytest.raises(InputError, match="no step was recorded"):
            record_of(rows, (0, 0), top_k=1, num_ranks=2)


@pytest.mark.parametrize(("change", "words"), [
    ({"loads": [1, 2]}, "loads must have 4 numbers"),
    ({"loads": [1, 2, 3, -1]}, "loads must have 4 numbers"),
    ({"num_ranks": 3}, "num_ranks must divide"), ({"num_ranks": 0}, "num_ranks must divide"),
    ({"fullest_p50": 0.5}, "from 1 to num_ranks"),
    ({"fullest_p99": 9.0}, "from 1 to num_ranks"), ({"schema": "moetune.plan/1"}, "schema"),
    ({"more": 1}, "more"),
])  # fmt: skip
def test_wrong_records_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        routing_record(json.dumps(json.loads(record().text) | change), "f")


def test_loads_counted_by_place_become_those_of_the_experts() -> None:
    routing = record().in_order_of((2, 0, 3, 1))
    assert routing.loads == (4, 1, 5, 2)
    assert record().in_order_of(()) == record()


def test_a_models_record_has_one_of_each_layer() -> None:
    whole = ModelRoutingRecord(layers=(record(), record()))
    assert routing_record(whole.text, "f") == whole
    assert routing_record(record().text, "f") == record()
    with pytest.raises(InputError, match="must have a layer of experts"):
        ModelRoutingRecord(layers=())
    with pytest.raises(InputError, match="loads must have 5 numbers"):
        routing_record(whole.text.replace('"num_experts": 4', '"num_experts": 5'), "f")


OLMOE, DEEPSEEK = (named_model(name).decoder for name in ("olmoe", "deepseek-v3"))
SMALL = replace(OLMOE, blocks=OLMOE.blocks[:3])


def layer(*loads: float, spread: float = 1.0) -> RecordedLayer:
    return RecordedLayer(loads=ExpertLoads(name="f", loads=loads), spread=spread, top_k=1)


def layers(*some: RecordedLayer) -> RecordedLayers:
    return RecordedLayers(name="f", layers=some)


def test_each_layer_has_its_fullest_rank_and_the_mean_is_that_of_all() -> None:
    routing = layers(layer(4, 2, 1, 1), layer(1, 1, 3, 3, spread=1.2), layer(1, 1, 1, 1))
    assert [routing.skew(index, 2).mean for index in range(3)] == pytest.approx([1.5, 1.5, 1.0])
    assert [routing.skew(index, 4).mean for index in range(3)] == pytest.approx([2.0, 1.5, 1.0])
    assert [routing.skew(index, 2).p99 for index in range(3)] == pytest.approx([1.5, 1.8, 1.0])
    mean = routing.skew(None, 2)
    assert [mean.mean, mean.p99] == pytest.approx([4 / 3, 4.3 / 3])
    assert [routing.skew(index, 1).p99 for index in (0, 1, None)] == [1.0, 1.0, 1.0]


def test_records_distinguish_layers_and_change_nothing_else_of_the_model() -> None:
    routing = layers(layer(1, 2), layer(3, 4), layer(1, 2))
    apart = routing.with_numbers(SMALL)
    assert [block.routed.record for block in apart.blocks if block.routed] == [0, 1, 0]
    assert (len(apart.kinds), len(SMALL.kinds)) == (2, 1)
    assert repr(apart) == repr(SMALL)
    assert apart.with_records((None,) * 3) == SMALL
    assert apart != SMALL
    assert apart.layer == SMALL.layer


def test_blocks_without_experts_and_predictions_have_no_record() -> None:
    num = DEEPSEEK.num_moe_layers
    apart = layers(*(layer(1, 2 + index) for index in range(num))).with_numbers(DEEPSEEK)
    records = [block.routed and block.routed.record for block in apart.blocks]
    assert records == [None] * (len(DEEPSEEK.blocks) - num) + [*range(num)]
    assert apart.predictions == DEEPSEEK.predictions


def test_a_job_takes_the_record_of_a_layer_or_one_routing_for_all() -> None:
    routing = layers(layer(4, 2, 1, 1), layer(1, 1, 3, 3), layer(1, 1, 1, 1))
    job = TrainingJob(
        decoder=routing.with_numbers(SMALL), world_size=2, global_batch=2, length=8, routing=routing
    )
    parts = [block.routed for block in job.decoder.blocks]
    assert [job.skew(part, 4).mean for part in parts if part] == pytest.approx([2.0, 1.5, 1.0])
    [part] = {block.routed for block in job.with_mean_layers.decoder.blocks}
    assert part is not None
    assert job.with_mean_layers.skew(part, 4).mean == pytest.approx(1.5)
    other = TrainingJob(decoder=SMALL, world_size=2, global_batch=2, length=8, routing=NATURAL)
    skew = other.skew(part, 4)
    assert 1 < skew.mean < skew.p99 == NATURAL.skew(part.num_experts, part.mean_top_k, 4)
