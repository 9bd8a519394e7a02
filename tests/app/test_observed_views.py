"""A verification ends in a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.app.verify import Verification, VerifiedStep
from moetune.app.views.observed import verdict, verification_sections
from tests.report.lab import lab_plan

PLAN = lab_plan()
PLANNED = VerifiedStep(forward_degree=2, backward_degree=2, strategy="none", is_planned=True,
                       predicted_seconds=1.0, forward_seconds=0.5, backward_seconds=0.6,
                       step_seconds=1.25, raw_step_seconds=(1.25,), deviation=2e-7)  # fmt: skip
ALONE = replace(PLANNED, forward_degree=1, backward_degree=1, is_planned=False,
                predicted_seconds=3.0, step_seconds=2.5)  # fmt: skip


def verification(*steps: VerifiedStep) -> Verification:
    return Verification(plan_id=PLAN.id, steps=steps, tolerance=1e-5, imbalance=1.25,
                        range_seconds=(1, 2))  # fmt: skip


@pytest.mark.parametrize(("changes", "alone", "holds", "says"), [
    ({}, 2.5, True, "holds here: its step of 1.25 s is inside its range of 1.00 s to 2.00 s"),
    ({"range_seconds": None}, 2.5, True, "takes 1.25 s, and it promised no range"),
    ({"range_seconds": (2.0, 3.0)}, 2.5, False, "missed its range of 2.00 s to 3.00 s"),
    ({}, 1.0, False, "lost to one chunk, which is 25.0 % faster than its 1.25 s"),
    ({}, 1.24, True, "holds here"),
    ({"tolerance": 1e-9}, 2.5, False, "changed the numbers"),
])  # fmt: skip
def test_a_verification_ends_in_a_sentence(
    changes: dict[str, Any], alone: float, says: str, *, holds: bool
) -> None:
    outcome = replace(verification(replace(ALONE, step_seconds=alone), PLANNED), **changes)
    assert outcome.holds is holds
    assert says in verdict(PLAN, outcome)
    assert outcome.document["is_inside"] is not ("missed" in says)
    assert outcome.document["has_lost"] is ("lost" in says)


@pytest.mark.parametrize(("seconds", "error"), [(1.0, "-20.0 %"), (1.5, "+20.0 %")])
def test_an_error_of_a_prediction_has_its_sign(seconds: float, error: str) -> None:
    planned = replace(PLANNED, predicted_seconds=seconds)
    [section] = verification_sections(PLAN, verification(ALONE, planned))
    assert f"({error})" in " ".join(section.paragraphs)


def test_steps_by_another_kernel_are_listed_and_count_for_equal_numbers_alone() -> None:
    alone, planned = (replace(step, kernel="grouped_mm") for step in (ALONE, PLANNED))
    other = replace(
        PLANNED, kernel="loop", is_planned=False, predicted_seconds=None, step_seconds=0.9
    )
    outcome = replace(verification(alone, planned, other), kernel="grouped_mm")
    assert (outcome.fastest, outcome.holds) == (planned, True)
    [section] = verification_sections(PLAN, outcome)
    [table] = section.tables
    kernels = [row[table.header.index("kernel")] for row in table.rows]
    assert [cell.text for cell in kernels] == ["grouped_mm", "grouped_mm", "loop"]
    assert not replace(outcome, steps=(alone, planned, replace(other, deviation=1.0))).is_equal
