"""Layers of a model with routing of their own: how full each one's fullest rank is."""

from dataclasses import replace

import pytest

from moetune.domain.recorded_layers import RecordedLayer, RecordedLayers, alike
from moetune.domain.routing import NATURAL, ExpertLoads
from moetune.domain.training import TrainingJob
from moetune.huggingface.registry import named_model

OLMOE, DEEPSEEK = (named_model(name).decoder for name in ("olmoe", "deepseek-v3"))
SMALL = replace(OLMOE, blocks=OLMOE.blocks[:3])


def layer(*loads: float, spread: float = 1.0) -> RecordedLayer:
    return RecordedLayer(loads=ExpertLoads(name="f", loads=loads), spread=spread, top_k=1)


def layers(*some: RecordedLayer) -> RecordedLayers:
    return RecordedLayers(name="f", layers=some)


def test_each_layer_has_its_own_fullest_rank_and_the_mean_is_that_of_all() -> None:
    found = layers(layer(4, 2, 1, 1), layer(1, 1, 3, 3, spread=1.2), layer(1, 1, 1, 1))
    assert [found.skew(one, 2).mean for one in range(3)] == pytest.approx([1.5, 1.5, 1.0])
    assert [found.skew(one, 4).mean for one in range(3)] == pytest.approx([2.0, 1.5, 1.0])
    assert [found.skew(one, 2).p99 for one in range(3)] == pytest.approx([1.5, 1.8, 1.0])
    mean = found.skew(None, 2)
    assert [mean.mean, mean.p99] == pytest.approx([4 / 3, 4.3 / 3])
    assert [found.skew(one, 1).p99 for one in (0, 1, None)] == [1.0, 1.0, 1.0]


def test_layers_are_told_apart_by_their_records_and_nothing_else_of_the_model_changes() -> None:
    found = layers(layer(1, 2), layer(3, 4), layer(1, 2))
    apart = found.told_apart(SMALL)
    assert [block.routed.record for block in apart.blocks if block.routed] == [0, 1, 0]
    assert (len(apart.kinds), len(SMALL.kinds)) == (2, 1)
    assert repr(apart) == repr(SMALL)
    assert alike(apart) == SMALL
    assert apart != SMALL
    assert apart.layer == SMALL.layer


def test_blocks_without_experts_and_predictions_have_no_record() -> None:
    num = DEEPSEEK.num_moe_layers
    apart = layers(*(layer(1, 2 + one) for one in range(num))).told_apart(DEEPSEEK)
    records = [block.routed and block.routed.record for block in apart.blocks]
    assert records == [None] * (len(DEEPSEEK.blocks) - num) + [*range(num)]
    assert apart.predictions == DEEPSEEK.predictions


def test_a_job_takes_the_record_of_a_layer_or_one_routing_for_all() -> None:
    found = layers(layer(4, 2, 1, 1), layer(1, 1, 3, 3), layer(1, 1, 1, 1))
    job = TrainingJob(
        decoder=found.told_apart(SMALL), world_size=2, global_batch=2, length=8, routing=found
    )
    parts = [block.routed for block in job.decoder.blocks]
    assert [job.skew(part, 4).mean for part in parts if part] == pytest.approx([2.0, 1.5, 1.0])
    [part] = {block.routed for block in job.alike.decoder.blocks}
    assert part is not None
    assert job.alike.skew(part, 4).mean == pytest.approx(1.5)
    other = TrainingJob(decoder=SMALL, world_size=2, global_batch=2, length=8, routing=NATURAL)
    skew = other.skew(part, 4)
    assert 1 < skew.mean < skew.p99 == NATURAL.skew(part.num_experts, part.mean_top_k, 4)
