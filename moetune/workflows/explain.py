"""What a plan's numbers consist of, from the profile that it was made with."""

from contextlib import suppress
from dataclasses import dataclass

from moetune.domain.costs import Costs, Trust
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Workload
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.choice import Bounds
from moetune.solve.layer_costs import layer_costs
from moetune.solve.layout_moe import best_moe_step
from moetune.solve.layout_ranks import groups_of
from moetune.solve.predict import PhaseTime
from moetune.solve.step import step_time
from moetune.workflows.plan import ALLOW_MODELLED
from moetune.workflows.profiles import FoundProfile, find_profile, named_profile
from moetune.workflows.strategy_terms import StrategyTerms, strategies_of
from moetune.workflows.wiring import StoreFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTerms:
    """One phase of the plan, in seconds.

    Args:
        gathering_seconds: of all ranks' tokens, before the first chunk; 0 without sequence shards.
        transfer_seconds: one chunk's dispatch, which is also its combine; or its sum.
        compute_seconds: one chunk's experts.
        total_transfer_seconds: all dispatches and combines, or the gathering and all sums,
            undisturbed.
        total_compute_seconds: all experts, undisturbed.
        exposed_communication_seconds: what the phase takes beyond its experts.
        hidden_seconds: what the overlap saves of everything one after another.
    """

    degree: int
    seconds: float
    gathering_seconds: float
    transfer_seconds: float
    compute_seconds: float
    total_transfer_seconds: float
    total_compute_seconds: float
    exposed_communication_seconds: float
    hidden_seconds: float
    transfer_trust: Trust
    compute_trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan with the terms behind it.

    Args:
        forward, backward: None where the profile cannot be had; `note` says why.
        strategies: all memory strategies beside each other; empty without the profile, and
            where the layout leaves no choice.
        profile: what the terms were computed from.
    """

    plan: Plan
    forward: PhaseTerms | None
    backward: PhaseTerms | None
    strategies: tuple[StrategyTerms, ...]
    profile: Profile | None
    note: str

    @property
    def memory_limit_bytes(self) -> int | None:
        """Of one device: the plan's limit, else all that the profile's device has."""
        known = self.profile.machine.memory_bytes if self.profile else None
        return self.plan.inputs.memory_limit_bytes or known


def explain_plan(plan: Plan, *, profile: Profile) -> Explanation:
    """Return the terms of a plan that was made with this profile.

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    inputs, workload = plan.inputs, plan.workload
    costs = costs_of(profile, allow_modelled=ALLOW_MODELLED in inputs.constraints)
    if plan.transformer is not None:
        return _explain_in_layout(plan, workload=workload, costs=costs, profile=profile)
    step = step_time(
        costs=layer_costs(workload=workload, costs=costs),
        tokens=inputs.tokens_per_rank,
        forward_degree=plan.pipeline.forward_degree,
        backward_degree=plan.pipeline.backward_degree,
        order=plan.pipeline.order,
        strategy=plan.memory.strategy,
    )
    return Explanation(
        plan=plan,
        forward=_terms(step.forward),
        backward=_terms(step.backward),
        strategies=strategies_of(plan, profile=profile, workload=workload),
        profile=profile,
        note="",
    )


def _explain_in_layout(
    plan: Plan, *, workload: Workload, costs: Costs, profile: Profile
) -> Explanation:
    """Return the terms of the MoE layer inside a whole model's layout."""
    groups = groups_of(plan.layout, per_node=profile.machine.devices_per_node)
    step = best_moe_step(
        workload=workload,
        num_nodes=groups.experts.num_nodes,
        costs=costs,
        bounds=Bounds(
            forward_degree=plan.pipeline.forward_degree,
            backward_degree=plan.pipeline.backward_degree,
            order=plan.pipeline.order,
        ),
    )
    return Explanation(
        plan=plan,
        forward=_terms(step.forward),
        backward=_terms(step.backward),
        strategies=(),
        profile=profile,
        note="",
    )


def explain_found(plan: Plan, *, profile: str | None, stores: StoreFinder) -> Explanation:
    """Return the terms of a plan from anywhere; without its profile, only the plan itself.

    Args:
        profile: where the plan's profile is, as in `find_profile`; default, by its name.

    Raises:
        MoetuneError: the profile that is named is missing or broken.
    """
    found: FoundProfile | None = None
    if profile is not None:
        found = find_profile(profile, stores=stores)
    else:
        with suppress(ProfileError), stores() as store:
            found = named_profile(plan.inputs.profile, store=store)
    return explain_from(plan, found)


def explain_from(plan: Plan, found: FoundProfile | None) -> Explanation:
    """Return the terms of a plan from the profile of its name, where that is still the same.

    Args:
        found: None where nothing has that name.

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    inputs = plan.inputs
    if found is None:
        return _without_terms(
            plan, f"profile {inputs.profile!r} is not here, name it with --profile"
        )
    if found.digest != inputs.profile_fingerprint:
        return _without_terms(
            plan,
            f"profile {found.profile.name!r} is not the one the plan was made with, "
            "or has changed since",
        )
    return explain_plan(plan, profile=found.profile)


def _without_terms(plan: Plan, reason: str) -> Explanation:
    return Explanation(
        plan=plan,
        forward=None,
        backward=None,
        strategies=(),
        profile=None,
        note=f"{reason}: the terms behind the times cannot be shown",
    )


def _terms(phase: PhaseTime) -> PhaseTerms:
    return PhaseTerms(
        degree=phase.degree,
        seconds=phase.seconds,
        gathering_seconds=phase.gathering.seconds,
        transfer_seconds=phase.transfer.seconds,
        compute_seconds=phase.compute.seconds,
        total_transfer_seconds=phase.link_seconds,
        total_compute_seconds=phase.device_seconds,
        exposed_communication_seconds=max(0.0, phase.seconds - phase.device_seconds),
        hidden_seconds=max(0.0, phase.work_seconds - phase.seconds),
        transfer_trust=phase.transfer.trust,
        compute_trust=phase.compute.trust,
    )
