"""What `verify` says of operations: the one that differs most from its prediction, if one does."""

from dataclasses import replace

import pytest

from moetune.domain.operations import Operation, OperationTimes
from moetune.domain.plan import Plan
from moetune.workflows.verify import (
    Verification,
    VerifiedStep,
    observations_of,
)
from moetune.workflows.views.observed import MOVED, verification_sections
from tests.workflows.observed import PLAN

TRANSFER = Operation(name="all_to_all", phase="forward", size=2**21, degree=2)
EXPERTS = Operation(name="experts", phase="backward", size=2**30, degree=2)


def verification(plan: Plan, transfer: float, experts: float | None) -> Verification:
    """Return a plan's steps whose operations take so many times their prediction."""
    operations = (
        OperationTimes(operation=TRANSFER, predicted_seconds=0.01, seconds=(0.01 * transfer,)),
        OperationTimes(
            operation=EXPERTS, predicted_seconds=None if experts is None else 0.02,
            seconds=(0.02 * (experts or 9.0),),
        ),
    )  # fmt: skip
    planned = VerifiedStep(
        forward_degree=2, backward_degree=2, strategy="none", is_planned=True,
        predicted_seconds=0.1, forward_seconds=0.04, backward_seconds=0.06, step_seconds=0.1,
        raw_step_seconds=(0.1,), deviation=0.0, operations=operations,
    )  # fmt: skip
    one = replace(planned, forward_degree=1, backward_degree=1, is_planned=False, operations=())
    return Verification(
        plan_id=plan.id, steps=(one, planned), tolerance=1e-4, imbalance=1.0, device_id="ab"
    )


@pytest.mark.parametrize(
    ("transfer", "experts", "named"),
    [
        (2.0, 1.2, "all_to_all"),
        (1.2, 0.5, "experts"),
        (2.0, None, "all_to_all"),
        (MOVED * 0.99, 1 / MOVED * 1.01, ""),
    ],
)
def test_the_operation_that_moved_most_is_named(
    transfer: float, experts: float | None, named: str
) -> None:
    (section,) = verification_sections(PLAN, verification(PLAN, transfer, experts))
    others = {"all_to_all", "experts"} - {named}
    assert len(section.paragraphs) == (2 if named else 1)
    if named:
        assert named in section.paragraphs[1]
        assert not any(f"{other} " in section.paragraphs[1] for other in others)


def test_a_verification_is_observed_with_its_operations_and_machine() -> None:
    one, planned = observations_of(PLAN, verification(PLAN, 2.0, 1.0))
    assert (one.operations, one.device_id, planned.device_id) == ((), "ab", "ab")
    assert [(times.operation, times.seconds) for times in planned.operations] == [
        (TRANSFER, (0.02,)), (EXPERTS, (0.02,)),
    ]  # fmt: skip
