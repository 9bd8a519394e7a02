"""Plans that place experts: when, why, and that all that reads them has the placement's times."""

import json
from dataclasses import replace
from typing import Any

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.app.subjects import LayerSubject
from moetune.domain.any_plan import plan_from_json
from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.layer import LayerShape
from moetune.domain.placement import PlacementChoice, places_of
from moetune.domain.plan import Plan
from moetune.domain.question import Question
from moetune.domain.request import answers_of
from moetune.fit.costs import costs_of
from moetune.solve.trace import plan_step

PROFILE = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=64, top_k=2)
STEEP = [round(1000 / (expert + 1)) for expert in range(64)]
"""A power law: the first of 8 ranks has most rows."""


def planned(loads: list[int] | None = None, *, layer: LayerShape = LAYER, **options: Any) -> Plan:
    spread, bounds = options.pop("spread", 1), options.pop("bounds", Bounds())
    options["expert_placement"] = options.pop("rule", None)
    if loads is not None:
        options["routing"] = f"{' '.join(map(str, loads))} / {spread}"
    usual = {"dtype": "float16", "world_size": 8, "tokens": 4096, "allow_modelled": True}
    pins = answers_of(Constraints(bounds=bounds))
    question = Question(**encode(layer) | usual | pins | options)
    return make_plan(question, profile=PROFILE)


def test_uneven_experts_are_placed_and_the_step_is_that_of_the_fullest_rank() -> None:
    natural, placed = planned(STEEP, rule="natural"), planned(STEEP)
    choice = placed.placement
    assert choice is not None
    assert natural.placement is None
    assert natural.workload.skew.mean == pytest.approx(choice.natural_skew)
    rows = [STEEP[expert] for expert in choice.experts]
    blocks = [sum(rows[at : at + 8]) for at in range(0, 64, 8)]
    assert choice.placed_skew == pytest.approx(max(blocks) * 8 / sum(STEEP))
    assert choice.placed_skew == choice.least_skew == placed.workload.skew.mean
    assert choice.natural_step_seconds == natural.predicted.step_seconds
    assert choice.placed_step_seconds == placed.predicted.step_seconds
    assert choice.gain == pytest.approx(
        1 - placed.predicted.step_seconds / natural.predicted.step_seconds
    )
    assert "instead of" in choice.why


def test_what_reads_a_plan_has_the_placements_times() -> None:
    placed = planned(STEEP)
    again = plan_from_json(canonical_json(placed), "plan")
    assert again == placed
    step = plan_step(plan=placed, costs=costs_of(PROFILE, allow_modelled=True))
    assert step.seconds == pytest.approx(placed.predicted.step_seconds)
    subject = LayerSubject(plan=placed, profile=PROFILE)
    assert subject.seconds() == pytest.approx(placed.predicted.step_seconds)
    assert len(list(subject.neighbours())) > 1


def test_a_placement_that_gains_little_is_not_taken() -> None:
    nearly = [100] * 63 + [101]
    choice = planned(nearly).placement
    assert choice is not None
    assert choice.experts == ()
    assert planned(nearly).experts == ()
    assert "less than 2 %" in choice.why or "no placement was found" in choice.why
    little = [100 + 2 * (expert < 8) for expert in range(64)]
    placed = planned(little)
    assert placed.placement is not None
    assert placed.experts == ()
    assert 0 < (placed.placement.gain or 0) <= 0.02
    assert placed.predicted == planned(little, rule="natural").predicted


def test_an_order_that_does_not_fit_is_placed() -> None:
    """A limit between the two peaks: only the placement is feasible."""
    pins = Bounds(strategy="none", forward_degree=2)
    natural, placed = (
        planned(STEEP, rule=rule, spread=1.2, bounds=pins).memory.peak_bytes
        for rule in ("natural", "planned")
    )
    assert natural is not None
    assert placed is not None
    limit = (natural + placed) // 2
    only = planned(STEEP, spread=1.2, bounds=pins, memory_limit=limit)
    assert only.placement is not None
    assert only.experts
    assert only.placement.natural_step_seconds is None
    assert only.placement.gain is None
    assert "do not fit" in only.placement.why
    with pytest.raises(InfeasiblePlanError):
        planned(STEEP, rule="natural", spread=1.2, bounds=pins, memory_limit=limit)
    with pytest.raises(InfeasiblePlanError):
        planned(STEEP, spread=1.2, bounds=pins, memory_limit=2**20)


@pytest.mark.unmeasured
def test_nothing_is_placed_without_loads_or_on_one_rank() -> None:
    assert planned().placement is None
    assert planned(STEEP, world_size=1).placement is None
    document = json.loads(canonical_json(planned()))
    assert "placement" not in document
    with pytest.raises(InputError, match="natural needs --routing"):
        planned(rule="natural")


def test_a_placement_has_each_expert_once() -> None:
    plan = planned(STEEP)
    assert plan.placement is not None
    with pytest.raises(InputError, match=f"no place for expert {plan.experts[-1]}"):
        replace(plan.placement, experts=(*plan.experts[:-1], plan.experts[0]))
    other = replace(plan.placement, experts=(1, 0))
    with pytest.raises(InputError, match="2 places for 64 experts"):
        replace(plan, placement=other)
    with pytest.raises(InputError, match="2 places for 64 experts"):
        replace(plan.workload, placement=(1, 0))
    assert isinstance(other, PlacementChoice)
    assert places_of((2, 0, 1)) == (1, 2, 0)
