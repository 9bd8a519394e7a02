"""Sections of what is worth measuring for a plan, and of the plan that followed."""

from dataclasses import replace

import pytest

from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.domain.samples import CollectivePoint, Point
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.profile_for import ImprovedPlan
from moetune.workflows.profile_request import ProfileOutcome
from moetune.workflows.views.worth import improved_section, worth_section
from moetune.workflows.worth import PlanWorth, WorthyOperations

BEFORE = Confidence(
    probability_best=0.4, expected_regret=0.0564, p05_step_seconds=0.064, p95_step_seconds=0.186
)
AFTER = replace(BEFORE, expected_regret=0.0123, p05_step_seconds=0.097, p95_step_seconds=0.128)
POINTS: tuple[Point, ...] = tuple(
    CollectivePoint(op="all_to_all", group_size=2, num_bytes=size) for size in (64, 128)
)
EXCHANGES = WorthyOperations(
    operations=("all_to_all of 2 ranks", "all_to_all of 4 ranks"), regret_saved=0.03,
    range_saved=0.25, points=POINTS,
)  # fmt: skip
HIDDEN = WorthyOperations(
    operations=("copy",), regret_saved=-0.01, range_saved=0.1, points=POINTS[:1]
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile_file(bundled_profiles()["rtx2080ti-x64"])


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return make_plan(PlanRequest(model="gpt-s"), profile=profile)


def worth(*groups: WorthyOperations, after: Confidence = AFTER) -> PlanWorth:
    return PlanWorth(before=BEFORE, after=after, groups=groups, out_of_reach=("send of 8 ranks",))


def test_words_say_what_is_expected_to_be_gained(plan: Plan) -> None:
    section = worth_section(plan, worth(EXCHANGES))
    assert plan.id[:6] in section.title
    now, known = section.paragraphs
    for number in ("5.64 %", "64.0 ms", "186 ms"):
        assert number in now
    for number in ("1.23 %", "97.0 ms", "128 ms"):
        assert number in known
    (note,) = section.notes
    assert "send of 8 ranks" in note
    ((operations, count, loss, width),) = section.tables[0].rows
    assert operations.text == "all_to_all of 2 ranks and 1 more"
    assert (count.value, loss.value, width.value) == (2, 0.03, 0.25)


def test_errors_that_hide_others_are_explained_where_there_are_some(plan: Plan) -> None:
    (plain,) = worth_section(plan, worth(EXCHANGES)).tables
    (table,) = worth_section(plan, worth(EXCHANGES, HIDDEN)).tables
    (more,) = set(table.notes) - set(plain.notes)
    assert "Below 0" in more
    assert table.rows[1][0].text == "copy"


def test_where_nothing_is_worth_it_there_is_no_table(plan: Plan) -> None:
    section = worth_section(plan, worth(after=BEFORE))
    assert section.tables == ()
    assert "5.64 %" in section.paragraphs[0]
    assert "Nothing is worth measuring" in section.paragraphs[1]


def test_both_plans_are_compared(plan: Plan, profile: Profile) -> None:
    after = make_plan(PlanRequest(model="gpt-s", tokens_per_rank=1024), profile=profile)
    outcome = ProfileOutcome(profile=profile, run_id=1, location="", num_reused=0, groups=())
    section = improved_section(ImprovedPlan(before=plan, after=after, outcome=outcome))
    assert after.id[:6] in section.title
    *changes, first, second = section.paragraphs
    assert any("instead of" in one for one in changes)
    assert first.startswith("Before: ")
    assert second.startswith("Now: ")
