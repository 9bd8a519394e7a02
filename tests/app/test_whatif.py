"""What-if plans against plans that are made in the ordinary way."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.app.whatif import WhatIf, change_plan
from moetune.domain.document import encode
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.question import Question
from moetune.fit.speeds import Speeds, scale_profile
from moetune.report.comparison import WhatIfAnswer
from tests.fit.measured import measured_profile
from tests.solve.clusters import GB, cluster_profile

pytestmark = pytest.mark.unmeasured

PROFILE = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
MEASURED = measured_profile()
LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=4)
SMALL = Question(**encode(LAYER), tokens=2048)


def changed(
    plan: Plan,
    *,
    profile: Profile = PROFILE,
    changes: Mapping[str, object] | None = None,
    speeds: Mapping[str, float] | None = None,
) -> WhatIfAnswer:
    question = WhatIf(changes=changes or {}, speeds=speeds or {})
    return change_plan(plan, profile=profile, question=question)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(Question(model="gpt-xl"), profile=PROFILE)


@pytest.fixture(scope="module")
def measured() -> Plan:
    return make_plan(SMALL, profile=MEASURED)


@pytest.mark.parametrize(("changes", "request_"), [
    ({"tokens_per_rank": 32768}, Question(model="gpt-xl", tokens=32768)),
    ({"dtype": "float16"}, Question(model="gpt-xl", dtype="float16")),
    ({"memory_limit_bytes": 2**31}, Question(model="gpt-xl", memory_limit=2**31)),
    ({"constraints": {"max-degree": "2"}, "tokens_per_rank": 512},
     Question(model="gpt-xl", tokens=512, max_degree=2)),
    ({"tokens_per_rank": None}, Question(model="gpt-xl")),
])  # fmt: skip
def test_changed_inputs_give_the_plan_that_would_be_made_for_them(
    plan: Plan, changes: dict[str, object], request_: Question
) -> None:
    answer = changed(plan, changes=changes)
    assert answer.before == plan
    assert answer.after == make_plan(request_, profile=PROFILE)


def test_a_constraint_is_taken_back_with_none() -> None:
    plan = make_plan(Question(model="gpt-xl", forward_degree=7, max_degree=16), profile=PROFILE)
    answer = changed(plan, changes={"constraints": {"forward-degree": None}})
    assert answer.after.as_layer().inputs.constraints == {"max-degree": "16"}
    assert answer.words[0] == "Without --forward-degree 7."


def test_experts_that_grow_with_the_ranks_grow() -> None:
    profile = cluster_profile(num_devices=64, between=2 * GB)
    plan = make_plan(Question(model="tm-2", world_size=16), profile=profile)
    answer = changed(plan, profile=profile, changes={"world_size": 64})
    assert answer.after.as_layer().inputs.layer.num_experts == 128
    assert "64 ranks instead of 16" in answer.words[0]
    assert "128 experts instead of 32" in answer.words[0]


def test_ranks_that_were_not_measured_are_estimated_and_the_plan_says_so(plan: Plan) -> None:
    answer = changed(plan, changes={"world_size": 32})
    assert answer.after.as_layer().inputs.constraints == {"allow-modelled": "true"}
    assert any("all_to_all of 64 ranks stands in" in text for text in answer.words)
    assert "allow-modelled" not in answer.words[0]


def test_what_nothing_can_stand_in_for_is_an_error(plan: Plan, measured: Plan) -> None:
    with pytest.raises(ProfileError, match="bfloat16"):
        changed(measured, profile=MEASURED, changes={"dtype": "bfloat16"})
    with pytest.raises(InfeasiblePlanError):
        changed(plan, changes={"memory_limit_bytes": 1000})


def test_speeds_give_the_plan_of_the_scaled_profile_and_it_is_labelled(measured: Plan) -> None:
    answer = changed(measured, profile=MEASURED, speeds={"communication": 4.0})
    scaled = scale_profile(MEASURED, Speeds(communication=4.0))
    assert answer.after == make_plan(SMALL, profile=scaled)
    assert measured.predicted.trust != "modelled"
    assert answer.after.trust == "modelled"
    assert answer.after.step_seconds < measured.predicted.step_seconds
    assert answer.words[0] == "With profile lab with communication × 4 instead of lab."
    assert any("The times are modelled" in text for text in answer.words)
    assert not any("assume an error" in text for text in answer.words)


@pytest.mark.parametrize("profile", [MEASURED, PROFILE], ids=["measured", "published"])
def test_everything_twice_as_fast_takes_half_the_time(profile: Profile) -> None:
    request = SMALL if profile is MEASURED else Question(model="gpt-xl")
    plan = make_plan(request, profile=profile)
    speeds = {"computation": 2.0, "communication": 2.0, "copies": 2.0}
    after = changed(plan, profile=profile, speeds=speeds).after.as_layer()
    assert after.pipeline == plan.pipeline
    assert after.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds / 2, rel=1e-9)


def test_the_same_again_is_said_to_be_the_same(plan: Plan) -> None:
    answer = changed(plan, changes={"world_size": plan.inputs.world_size})
    assert replace(answer.after.as_layer(), warnings=plan.warnings) == plan
    assert answer.words[0] == "The plan is already made for these inputs."
    assert answer.words[1].endswith(", as before.")
