"""Measurement of what a plan is least sure of, and the plan that follows: `profile --for PLAN`."""

from dataclasses import dataclass

from moetune.domain.cluster import Cluster
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Plan
from moetune.domain.ports import Store
from moetune.domain.profile import Profile
from moetune.measure.grid import Preset
from moetune.workflows.plan import make_plan
from moetune.workflows.profile import profile_machine
from moetune.workflows.profile_request import MeasurementSetting, ProfileOutcome, ProfileRequest
from moetune.workflows.recording import Progress
from moetune.workflows.staleness import Change
from moetune.workflows.worth import PlanWorth

NUM_CHANGES = 3
"""Most changed facts that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovedPlan:
    """The plan of the same request after its profile was improved.

    Args:
        outcome: of the measurement.
    """

    before: Plan
    after: Plan
    outcome: ProfileOutcome


def request_for(
    profile: Profile,
    worth: PlanWorth,
    *,
    preset: Preset = "quick",
    budget_seconds: float | None = None,
) -> ProfileRequest:
    """Return the request for the points that are worth measuring, on the profile's ranks."""
    return ProfileRequest(
        name=profile.name,
        num_ranks=profile.machine.num_devices,
        preset=preset,
        budget_seconds=budget_seconds,
        points=worth.points,
    )


def check_machine(profile: Profile, cluster: Cluster) -> None:
    """Raise InputError where samples of this machine cannot be added to the profile's.

    Args:
        cluster: as the measuring ranks see it.
    """
    here, there = cluster.fingerprint, profile.fingerprint
    if here.hardware != there.hardware:
        raise InputError(
            f"profile {profile.name!r} is not of this machine with "
            f"{cluster.machine.num_devices} ranks",
            "measure where it was measured, on as many ranks, or make a plan with a profile of "
            "this machine",
        )
    if here != there:
        names = sorted({*here.software, *there.software})
        changed = [
            Change(name=name, profiled=there.software.get(name), now=here.software.get(name)).words
            for name in names
            if here.software.get(name) != there.software.get(name)
        ]
        raise InputError(
            f"profile {profile.name!r} was measured with other software: "
            + "; ".join(changed[:NUM_CHANGES]),
            f"see whether it still holds with `moetune profiles check {profile.name}`, "
            "and plan again",
        )


def improve_plan(
    plan: Plan,
    request: ProfileRequest,
    setting: MeasurementSetting,
    *,
    store: Store,
    progress: Progress,
) -> ImprovedPlan:
    """Measure the request's points, add them to the plan's profile, and plan again.

    The profile keeps its samples; those of a point that was measured again are pooled. The new
    plan is stored.

    Raises:
        CollectiveError: a rank died.
        ProfileError: nothing could be measured.
        KeyboardInterrupt: Ctrl-C; the next request of the same points continues the run.
    """
    outcome = profile_machine(request, setting, store=store, progress=progress)
    after = make_plan(plan.inputs.request, profile=outcome.profile)
    store.save_plan(after)
    return ImprovedPlan(before=plan, after=after, outcome=outcome)


def confidence_in(plan: Plan) -> Confidence | None:
    """Return the confidence in the plan: of a model in its layout; None in older plans."""
    if plan.transformer is not None:
        return plan.transformer.confidence
    verdict, times = plan.decision, plan.predicted
    return Confidence(
        probability_best=verdict.probability_best,
        expected_regret=verdict.expected_regret,
        p05_step_seconds=times.p05_step_seconds,
        p95_step_seconds=times.p95_step_seconds,
    )


def for_document(
    plan: Plan, worth: PlanWorth, *, seconds: float | None, improved: ImprovedPlan | None
) -> dict[str, object]:
    """Return the JSON document of `moetune profile --for`.

    Args:
        seconds: estimated time to measure; None where nothing was estimated.
        improved: None where nothing was measured.
    """
    after = None
    if improved is not None:
        pipeline = improved.after.pipeline
        after = {
            "plan_id": improved.after.id,
            "forward_degree": pipeline.forward_degree,
            "backward_degree": pipeline.backward_degree,
            "strategy": improved.after.memory.strategy,
            "confidence": encode(confidence_in(improved.after)),
        }
    return {
        "schema": "moetune.profile-for/1",
        "plan_id": plan.id,
        "profile": plan.inputs.profile,
        "worth": encode(worth),
        "seconds": seconds,
        "run": None if improved is None else improved.outcome.document,
        "after": after,
    }
