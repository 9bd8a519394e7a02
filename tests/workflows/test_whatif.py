"""What-if plans against plans that are made in the ordinary way."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraints import Bounds, Constraints, Strategy
from moetune.domain.costs import Trust
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Binding, Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.fit.scaled import Speeds, scale_profile
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.plan_changes import compare_plans, name_changes
from moetune.workflows.whatif import WhatIf, WhatIfAnswer, change_plan
from tests.fit.measured import measured_profile
from tests.solve.clusters import GB, cluster_profile

pytestmark = pytest.mark.unmeasured

PROFILE = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
MEASURED = measured_profile()
LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=4)
SMALL = PlanRequest(layer=LAYER, tokens_per_rank=2048)
TWO_CHUNKS = Constraints(bounds=Bounds(max_degree=2))
PINNED = Constraints(bounds=Bounds(forward_degree=7, max_degree=16))


def changed(
    plan: Plan,
    *,
    profile: Profile = PROFILE,
    changes: Mapping[str, object] | None = None,
    speeds: Mapping[str, float] | None = None,
) -> WhatIfAnswer:
    question = WhatIf(plan_id=plan.id, changes=changes or {}, speeds=speeds or {})
    return change_plan(plan, profile=profile, question=question)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(PlanRequest(model="gpt-xl"), profile=PROFILE)


@pytest.fixture(scope="module")
def measured() -> Plan:
    return make_plan(SMALL, profile=MEASURED)


@pytest.mark.parametrize(
    ("changes", "request_"),
    [
        ({"tokens_per_rank": 32768}, PlanRequest(model="gpt-xl", tokens_per_rank=32768)),
        ({"dtype": "float16"}, PlanRequest(model="gpt-xl", dtype="float16")),
        ({"memory_limit_bytes": 2**31}, PlanRequest(model="gpt-xl", memory_limit_bytes=2**31)),
        (
            {"constraints": {"max-degree": "2"}, "tokens_per_rank": 512},
            PlanRequest(model="gpt-xl", tokens_per_rank=512, constraints=TWO_CHUNKS),
        ),
        ({"tokens_per_rank": None}, PlanRequest(model="gpt-xl")),
    ],
)
def test_changed_inputs_give_the_plan_that_would_be_made_for_them(
    plan: Plan, changes: dict[str, object], request_: PlanRequest
) -> None:
    answer = changed(plan, changes=changes)
    assert answer.before == plan
    assert answer.after == make_plan(request_, profile=PROFILE)


def test_a_constraint_is_taken_back_with_none() -> None:
    plan = make_plan(PlanRequest(model="gpt-xl", constraints=PINNED), profile=PROFILE)
    answer = changed(plan, changes={"constraints": {"forward-degree": None}})
    assert answer.after.inputs.constraints == {"max-degree": "16"}
    assert answer.words[0] == "Without --forward-degree 7."


def test_experts_that_grow_with_the_ranks_grow() -> None:
    profile = cluster_profile(num_devices=64, between=2 * GB)
    plan = make_plan(PlanRequest(model="tm-2", world_size=16), profile=profile)
    answer = changed(plan, profile=profile, changes={"world_size": 64})
    assert answer.after.inputs.layer.num_experts == 128
    assert "64 ranks instead of 16" in answer.words[0]
    assert "128 experts instead of 32" in answer.words[0]


def test_ranks_that_were_not_measured_are_estimated_and_the_plan_says_so(plan: Plan) -> None:
    answer = changed(plan, changes={"world_size": 32})
    assert answer.after.inputs.constraints == {"allow-modelled": "true"}
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
    assert answer.after.predicted.trust == "modelled"
    assert answer.after.predicted.step_seconds < measured.predicted.step_seconds
    assert answer.words[0] == "With communication 4 × as fast as measured."
    assert any("The times are modelled" in text for text in answer.words)
    assert not any("assume an error" in text for text in answer.words)


@pytest.mark.parametrize("profile", [MEASURED, PROFILE], ids=["measured", "published"])
def test_everything_twice_as_fast_takes_half_the_time(profile: Profile) -> None:
    request = SMALL if profile is MEASURED else PlanRequest(model="gpt-xl")
    plan = make_plan(request, profile=profile)
    speeds = {"computation": 2.0, "communication": 2.0, "copies": 2.0}
    after = changed(plan, profile=profile, speeds=speeds).after
    assert after.pipeline == plan.pipeline
    assert after.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds / 2, rel=1e-9)


def test_the_words_say_what_changed_by_how_much_and_why(plan: Plan) -> None:
    answer = changed(
        plan,
        changes={"tokens_per_rank": 2 * plan.inputs.tokens_per_rank},
        speeds={"communication": 8.0},
    )
    words = answer.words
    before, after = answer.before.predicted.step_seconds, answer.after.predicted.step_seconds
    assert words[0].startswith("With 16,384 tokens per rank instead of 8,192, communication 8 ×")
    change = abs(after / before - 1)
    assert f"{100 * change:.1f} %" in words[1] or "× as long" in words[1]
    assert "for each token" in words[1]
    now, then = answer.after.pipeline, answer.before.pipeline
    assert (now.forward_degree, now.backward_degree) != (then.forward_degree, then.backward_degree)
    assert (
        f"The chunks are {now.forward_degree} forward and {now.backward_degree} backward "
        f"instead of {then.forward_degree} and {then.backward_degree}." in words
    )
    assert answer.after.decision.why in words
    binding = answer.after.decision.binding
    assert any(text.startswith(binding.capitalize()) for text in words)
    assert all(text.endswith(".") for text in words)


def test_the_same_again_is_said_to_be_the_same(plan: Plan) -> None:
    answer = changed(plan, changes={"world_size": plan.inputs.world_size})
    assert replace(answer.after, warnings=plan.warnings) == plan
    assert answer.words[0] == "The plan is already made for these inputs."
    assert answer.words[1].endswith(", as before.")


def slower(plan: Plan, factor: float) -> Plan:
    times = plan.predicted
    return replace(plan, predicted=replace(times, step_seconds=factor * times.step_seconds))


def with_inputs(plan: Plan, **inputs: Any) -> Plan:
    changed_inputs = replace(plan.inputs, **inputs)
    return replace(plan, id=changed_inputs.plan_id, inputs=changed_inputs)


FIGURES = re.compile(r"\d+\.\d %|[\d.]+ ×")


@pytest.mark.parametrize(
    ("factor", "figures"),
    [
        (1.5, ["50.0 %"]),
        (1.9, ["90.0 %"]),
        (0.75, ["25.0 %"]),
        (2.4, ["2.4 ×"]),
        (2.0, ["2 ×"]),
        (0.5, ["0.5 ×"]),
        (0.51, ["49.0 %"]),
        (0.25, ["0.25 ×"]),
        (1.01, ["1.0 %"]),
        (1.0004, []),
        (0.9996, []),
        (1.0, []),
    ],
)
def test_a_step_is_longer_or_shorter_by_a_share_or_a_multiple(
    plan: Plan, factor: float, figures: list[str]
) -> None:
    first = next(iter(compare_plans(plan, slower(plan, factor))))
    assert FIGURES.findall(first) == figures
    # One that is not the same has both steps.
    assert len(re.findall(r"\d m?s\b", first)) == (2 if figures else 1)
    if figures and "%" in figures[0]:
        assert ("more" in first, "less" in first) == (factor > 1, factor < 1)


def test_nothing_takes_many_times_as_long_as_no_time(plan: Plan) -> None:
    first = next(iter(compare_plans(slower(plan, 0.0), plan)))
    assert "inf ×" in first


def test_other_numbers_of_tokens_are_compared_token_by_token(plan: Plan) -> None:
    tokens = plan.inputs.tokens_per_rank
    twice = with_inputs(slower(plan, 3.0), tokens_per_rank=2 * tokens)
    first = next(iter(compare_plans(plan, twice)))
    assert FIGURES.findall(first) == ["3 ×", "50.0 %"]


@pytest.mark.parametrize(
    ("inputs", "figures"),
    [
        ({"world_size": 32}, ["32", "64"]),
        ({"tokens_per_rank": 1024}, ["1,024", "8,192"]),
        ({"dtype": "float16"}, ["float16", "float32"]),
        ({"memory_limit_bytes": 2**30}, ["1.00 GiB", "all"]),
        ({"constraints": {"max-degree": "4"}}, ["--max-degree 4"]),
        ({}, []),
    ],
)
def test_changed_inputs_are_named_now_and_then(
    plan: Plan, inputs: dict[str, Any], figures: list[str]
) -> None:
    before = with_inputs(plan, dtype="float32", world_size=64, tokens_per_rank=8192)
    text = name_changes(before.inputs, with_inputs(before, **inputs).inputs, Speeds())
    found = r"--\w[\w-]+ \d+|[\d.]+ GiB|float\d+|\ball\b|(?<!float)\b\d[\d,]*\d\b"
    assert re.findall(found, text) == figures


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ({}, {"max-degree": "4"}, ["--max-degree 4"]),
        ({"max-degree": "4"}, {}, ["--max-degree 4"]),
        ({"max-degree": "4"}, {"max-degree": "8"}, ["--max-degree 8", "4"]),
        ({"max-degree": "4"}, {"max-degree": "4"}, []),
        ({}, {"allow-modelled": "true"}, []),
        ({"allow-modelled": "true"}, {}, []),
    ],
)
def test_changed_constraints_are_named_as_their_flags(
    plan: Plan, then: dict[str, str], now: dict[str, str], words: list[str]
) -> None:
    before, after = (with_inputs(plan, constraints=each) for each in (then, now))
    text = name_changes(before.inputs, after.inputs, Speeds())
    assert re.findall(r"--[\w-]+ \d|(?<=instead of )\d", text) == words
    assert text.startswith("Without ") is (bool(words) and not now)


def test_what_differs_is_said_and_what_does_not_is_not(plan: Plan) -> None:
    same = list(compare_plans(plan, plan))
    other: Strategy = "S4" if plan.memory.strategy != "S4" else "S1"
    reusing = replace(plan, memory=replace(plan.memory, strategy=other))
    assert len(list(compare_plans(plan, reusing))) == len(same) + 1
    trust: Trust = "measured" if plan.predicted.trust != "measured" else "modelled"
    trusted = replace(plan, predicted=replace(plan.predicted, trust=trust))
    assert len(list(compare_plans(plan, trusted))) == len(same) + 1
    warned = replace(plan, warnings=(*plan.warnings, "first", "second."))
    assert list(compare_plans(plan, warned))[-2:] == ["First.", "Second."]
    assert list(compare_plans(warned, plan)) == same


def test_memory_and_what_binds_are_compared(plan: Plan) -> None:
    memory = replace(plan.memory, peak_bytes=2**31)
    binding: Binding = "memory" if plan.decision.binding != "memory" else "copies"
    first = replace(plan, memory=memory)
    second = replace(
        first, memory=replace(memory, peak_bytes=3 * 2**30),
        decision=replace(plan.decision, binding=binding),
    )  # fmt: skip

    def sizes(before: Plan, after: Plan) -> list[str]:
        return re.findall(r"[\d.]+ GiB", " ".join(compare_plans(before, after)))

    assert sizes(first, second) == ["3.00 GiB", "2.00 GiB"]
    assert sizes(first, first) == ["2.00 GiB"]
    older = replace(
        memory, peak_bytes=None, state_bytes=2**29, activation_bytes=2**29, buffer_bytes=2**29
    )
    assert sizes(first, replace(plan, memory=older)) == ["1.50 GiB", "2.00 GiB"]
    found = list(compare_plans(first, second))
    assert any(binding in one.lower() and plan.decision.binding in one.lower() for one in found)
