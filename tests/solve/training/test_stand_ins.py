"""What a profile lacks is named, and widens the range of a step."""

import math

import pytest

from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.huggingface.registry import named_model
from moetune.solve.joint.uncertainty import P05_RATIO, P95_RATIO, confidence_of
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import plan_training
from moetune.workflows.training_plan import TrainingRequest


def test_ranges_of_independent_errors_add_up_in_squares() -> None:
    alone, wide = confidence_of([2.0, 3.0]), confidence_of([2.0, 3.0], ratios=(0.5, 4.0))
    assert alone.p05_step_seconds == pytest.approx(2 * P05_RATIO)
    assert alone.p95_step_seconds == pytest.approx(2 * P95_RATIO)
    longer = math.hypot(math.log(P95_RATIO), math.log(4.0))
    shorter = math.hypot(math.log(P05_RATIO), math.log(0.5))
    assert math.log(wide.p95_step_seconds / 2) == pytest.approx(longer)
    assert math.log(2 / wide.p05_step_seconds) == pytest.approx(shorter)
    assert wide.probability_best == alone.probability_best
    # A draw's quantile on the other side of 1 narrows nothing.
    assert confidence_of([2.0], ratios=(1.1, 0.9)) == confidence_of([2.0])


def planned(profile: str) -> TrainingDocument:
    job = TrainingJob(
        decoder=named_model("olmoe").decoder, world_size=32, global_batch=256, length=2048
    )
    request = TrainingRequest(
        job=job, pins=LayoutRequest(tp=1, pp=1, micro_batch=1), target=find_target("moetune")
    )
    return plan_training(request, load_profile_file(bundled_profiles()[profile]))


def test_wires_of_a_node_that_stand_for_a_network_are_named_and_widen_the_range() -> None:
    node, cluster = planned("a100-x4"), planned("a100-x8")
    assert "one node and no network: between the 8 nodes" in node.warnings[0]
    step, found = node.predicted.step_seconds, node.confidence
    assert found.p95_step_seconds > step * P95_RATIO * 1.001
    assert found.p05_step_seconds < step * P05_RATIO * 0.999
    assert not any("no network" in words for words in cluster.warnings)
    step, found = cluster.predicted.step_seconds, cluster.confidence
    assert found.p95_step_seconds == pytest.approx(step * P95_RATIO)
    assert found.p05_step_seconds == pytest.approx(step * P05_RATIO)
    assert any("rule for more ranks stands in" in words for words in cluster.warnings)
