"""Confidence in a step against drawn errors; what a profile lacks is named, and widens it."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.huggingface.registry import named_model
from moetune.solve.model.uncertainty import P05_RATIO, P95_RATIO, confidence_of


@pytest.mark.parametrize(
    "seconds", [[1.0], [1.0, 1.02], [1.0, 1.1, 1.1, 1.3], [1.0, 3.0], [1.2, 1.0], [1.0] * 6]
)
@pytest.mark.parametrize("spread", [0.03, 0.12, 0.4])
def test_the_sure_choice_is_that_of_drawn_errors(seconds: list[float], spread: float) -> None:
    draws = np.random.default_rng(7).normal(0.0, spread, (400_000, len(seconds)))
    steps = np.asarray(seconds) * np.exp(draws)
    regrets = steps[:, 0] / steps.min(axis=1) - 1.0
    confidence = confidence_of(seconds, layout_spread=spread)
    assert confidence.probability_best == pytest.approx((regrets == 0).mean(), abs=0.01)
    assert confidence.expected_regret == pytest.approx(regrets.mean(), abs=0.004, rel=0.03)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_a_shared_factor_changes_the_range_alone(seconds: list[float]) -> None:
    confidence, other = confidence_of(seconds), confidence_of([2.0 * step for step in seconds])
    assert other.probability_best == pytest.approx(confidence.probability_best, abs=1e-6)
    assert other.expected_regret == pytest.approx(confidence.expected_regret, abs=1e-6)
    assert other.p95_step_seconds == pytest.approx(2.0 * confidence.p95_step_seconds)


def test_the_range_is_the_record_s() -> None:
    confidence = confidence_of([2.0, 3.0])
    assert confidence.p05_step_seconds == pytest.approx(2.0 * P05_RATIO)
    assert confidence.p05_step_seconds < 2.0 < confidence.p95_step_seconds
    assert confidence.p95_step_seconds == pytest.approx(2.0 * P95_RATIO)


def test_runtimes_of_which_less_is_public_have_wider_ranges() -> None:
    ranges = [confidence_of([2.0], target=name) for name in ("bridge", "torchtitan", "deepspeed")]
    for narrow, wide in pairwise(ranges):
        assert wide.p05_step_seconds < narrow.p05_step_seconds
        assert wide.p95_step_seconds > narrow.p95_step_seconds


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
    step, confidence = node.predicted.step_seconds, node.confidence
    assert confidence.p95_step_seconds > step * P95_RATIO * 1.001
    assert confidence.p05_step_seconds < step * P05_RATIO * 0.999
    assert not any("no network" in words for words in cluster.warnings)
    step, confidence = cluster.predicted.step_seconds, cluster.confidence
    assert confidence.p95_step_seconds == pytest.approx(step * P95_RATIO)
    assert confidence.p05_step_seconds == pytest.approx(step * P05_RATIO)
    assert any("rule for more ranks stands in" in words for words in cluster.warnings)
