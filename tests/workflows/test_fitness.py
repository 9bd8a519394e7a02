"""The range of a new profile's plan, and the problem where there is none."""

import pytest

from moetune.domain.layer import LayerShape
from moetune.domain.request import PlanRequest
from moetune.workflows.fitness import fitness_of
from moetune.workflows.plan import make_plan
from moetune.workflows.profile_request import ProfileRequest
from tests.fit.measured import measured_profile

LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=4)
PROFILE = measured_profile()


def request(layer: LayerShape) -> ProfileRequest:
    return ProfileRequest(layers=(layer,), dtypes=("float32",), max_tokens=1024)


def test_the_range_is_that_of_the_layers_plan_on_all_ranks() -> None:
    found = fitness_of(PROFILE, request(LAYER))
    asked = PlanRequest(layer=LAYER, world_size=4, tokens_per_rank=1024)
    predicted = make_plan(asked, profile=PROFILE).predicted
    assert found is not None
    assert found.shorter is not None
    assert found.longer is not None
    assert found.shorter < 0 < found.longer
    step = predicted.step_seconds
    assert (1 + found.shorter) * step == pytest.approx(predicted.p05_step_seconds)
    assert (1 + found.longer) * step == pytest.approx(predicted.p95_step_seconds)
    assert "1,024" in found.words


def test_a_layer_that_cannot_be_planned_says_why_and_no_layer_says_nothing() -> None:
    odd = LayerShape(d_model=512, d_hidden=2048, num_experts=6)
    found = fitness_of(PROFILE, request(odd))
    assert found is not None
    assert found.shorter is found.longer is None
    assert found.problem in found.words
    assert fitness_of(PROFILE, ProfileRequest()) is None
