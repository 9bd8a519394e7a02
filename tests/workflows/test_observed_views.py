"""A verification ends in a sentence: whether the plan holds, missed its range or lost."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraints import Strategy
from moetune.workflows.verify import Verification, VerifiedStep
from moetune.workflows.views.observed import verdict
from tests.report.lab import lab_plan

PLAN = lab_plan()


def step(
    forward: int, backward: int, *, seconds: float, predicted: float | None = 1.0,
    planned: bool = False, strategy: Strategy = "none",
) -> VerifiedStep:  # fmt: skip
    return VerifiedStep(
        forward_degree=forward, backward_degree=backward, strategy=strategy, is_planned=planned,
        predicted_seconds=predicted, forward_seconds=seconds / 3, backward_seconds=seconds / 2,
        step_seconds=seconds, raw_step_seconds=(seconds,), deviation=forward * 1e-7,
    )  # fmt: skip


def verification(*steps: VerifiedStep) -> Verification:
    return Verification(plan_id=PLAN.id, steps=steps, tolerance=1e-5, imbalance=1.25)


PLANNED = step(2, 3, seconds=1.25, planned=True)
ALONE = step(1, 1, seconds=2.5, predicted=3.0)


@pytest.mark.parametrize(
    ("changes", "alone", "holds", "says"),
    [
        ({}, 2.5, True, "holds here: its step of 1.25 s is inside its range of 1.00 s to 2.00 s"),
        ({"range_seconds": None}, 2.5, True, "takes 1.25 s, and it promised no range"),
        ({"range_seconds": (2.0, 3.0)}, 2.5, False, "missed its own range of 2.00 s to 3.00 s"),
        ({}, 1.0, False, "lost to one chunk, which is 25.0 % faster than its 1.25 s"),
        ({}, 1.24, True, "holds here"),
        ({"tolerance": 1e-9}, 2.5, False, "changed the numbers"),
    ],
)
def test_a_verification_ends_in_a_sentence(
    changes: dict[str, Any], alone: float, says: str, *, holds: bool
) -> None:
    ranged = replace(
        verification(replace(ALONE, step_seconds=alone), PLANNED), range_seconds=(1, 2)
    )
    found = replace(ranged, **changes)
    assert found.holds is holds
    assert says in verdict(PLAN, found)
    assert found.document["is_inside"] is not ("missed" in says)
    assert found.document["has_lost"] is ("lost" in says)
