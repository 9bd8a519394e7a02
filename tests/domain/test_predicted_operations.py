"""Times that a plan predicts for single operations."""

from moetune.domain.operations import Operation, predicted_seconds
from moetune.domain.request import PlanRequest
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan


def test_a_plan_predicts_the_operations_of_its_own_degrees() -> None:
    profile = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
    plan = make_plan(PlanRequest(model="gpt-s", dtype="float16"), profile=profile)
    assert plan.terms is not None
    degree = plan.terms.forward.degree
    experts = Operation(name="experts", phase="forward", size=1, degree=degree)
    transfer = Operation(name="all_to_all", phase="forward", size=1, degree=degree)
    other = Operation(name="experts", phase="forward", size=1, degree=degree + 1)
    assert predicted_seconds(plan, experts) == plan.terms.forward.compute_seconds > 0
    assert predicted_seconds(plan, transfer) == plan.terms.forward.transfer_seconds > 0
    assert predicted_seconds(plan, other) is None
