"""What plans, comparisons and why-nots say of uneven routing and placed experts."""

from pathlib import Path

import pytest

from moetune.domain.constraints import Constraints
from moetune.domain.placement import PlacementRule
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.plan_changes import compare_plans
from moetune.workflows.views.words import routing_words
from moetune.workflows.whatif import WhatIf, change_plan
from moetune.workflows.why_not import WhyNot, compare_choices

EVEN = " ".join(["1"] * 64)
STEEP = " ".join(str(round(100 / rank)) for rank in range(1, 65))
BARELY = " ".join(["1.032"] * 8 + ["1"] * 56)
"""Loads whose placement is just worth it, and not with eight chunks."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile_file(Path(bundled_profiles()["rtx2080ti-x64"]))


def plan_of(profile: Profile, loads: str, order: PlacementRule = "planned") -> Plan:
    routing = f"{loads} / 1" if loads else ""
    constraints = Constraints(allow_modelled=True, routing=routing, expert_placement=order)
    return make_plan(
        PlanRequest(model="gpt-s", world_size=8, constraints=constraints), profile=profile
    )


def test_a_plan_says_how_uneven_its_routing_is_and_nothing_where_it_is_even(
    profile: Profile,
) -> None:
    assert not list(routing_words(plan_of(profile, EVEN)))
    assert not list(routing_words(plan_of(profile, "")))
    (placed,) = routing_words(plan_of(profile, STEEP))
    assert placed.startswith("Experts are placed by their loads: ")
    (natural,) = routing_words(plan_of(profile, STEEP, "natural"))
    assert natural.startswith("Routing is uneven: ")


def test_comparisons_say_that_experts_move(profile: Profile) -> None:
    placed, natural = (plan_of(profile, STEEP, order) for order in ("planned", "natural"))
    to, back = (" ".join(compare_plans(*two)) for two in ((natural, placed), (placed, natural)))
    assert "by their loads instead of in their order" in to
    assert "in their order instead of placed by their loads" in back
    other = change_plan(placed, profile=profile, question=WhatIf(changes={"world_size": 16})).after
    assert "by their loads instead of by other loads" in " ".join(compare_plans(placed, other))
    assert not [one for one in compare_plans(placed, placed) if "Experts" in one]


def test_loads_are_counted_in_sentences_and_not_spelled_out(profile: Profile) -> None:
    placed = plan_of(profile, STEEP)
    question = WhatIf(changes={"constraints": {"routing": None}})
    words = change_plan(placed, profile=profile, question=question).words
    assert words[0] == "Without --routing loads of 64 experts."


def test_why_not_says_where_experts_are_otherwise(profile: Profile) -> None:
    plan = plan_of(profile, BARELY)
    assert plan.experts
    answer = compare_choices(plan, profile=profile, question=WhyNot(degree=8))
    assert [one for one in answer.notes if "keep their order, and not as in the plan" in one]
