"""Every memory strategy of a plan's layer beside the others: bytes, seconds, and why it lost."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from moetune.domain.costs import Costs, Trust
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Workload
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import Strategy
from moetune.fit.costs import costs_of
from moetune.solve.layer.choose import Bounds, recorded_bounds
from moetune.solve.layer.memory import limit_of, total_bytes
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.predict import PhaseTime
from moetune.solve.layer.reuse import paper_seconds, step_time
from moetune.solve.layer.strategies import Contender, choose_strategy
from moetune.solve.layer.tensor import layer_costs
from moetune.solve.layer.words import explain_strategy_loss
from moetune.solve.model.costs import best_moe_step
from moetune.solve.model.groups import groups_of
from moetune.workflows.plan import ALLOW_MODELLED
from moetune.workflows.profiles import FoundProfile, find_profile, named_profile
from moetune.workflows.wiring import StoreFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTerms:
    """One strategy at its best; where nothing of it fits, at its fastest.

    Args:
        needed_bytes: on the device: states, activations and buffers, by Eq. 1 to 6.
        peak_bytes: of a step as the layer runs it, with rings and routing data.
        host_bytes: activations that wait in host memory.
        paper_seconds: MPipeMoE's Eq. 10.
        is_paper_choice: whether Eq. 10 would take it, among those that reuse memory.
        lost_because: empty for the plan's own.
    """

    strategy: Strategy
    forward_degree: int
    backward_degree: int
    step_seconds: float
    needed_bytes: int
    peak_bytes: int
    host_bytes: int
    saving_ratio: float
    fits: bool
    is_chosen: bool
    paper_seconds: float
    is_paper_choice: bool
    lost_because: str


def strategies_of(plan: Plan, *, profile: Profile, workload: Workload) -> tuple[StrategyTerms, ...]:
    """Return all strategies that have a price, solved with the plan's pins but for its strategy.

    None of a tensor-parallel layer, which reuses no memory.

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    if workload.expert_parallel == "tensor":
        return ()
    constraints = plan.inputs.constraints
    costs = layer_costs(
        workload=workload, costs=costs_of(profile, allow_modelled=ALLOW_MODELLED in constraints)
    )
    limit = limit_of(plan.inputs, device_memory_bytes=profile.machine.memory_bytes)
    contenders = choose_strategy(
        workload=workload,
        costs=costs,
        bounds=replace(recorded_bounds(constraints), order=None, strategy=None),
        limit_bytes=limit,
    ).contenders
    paper = {
        one.strategy: paper_seconds(
            costs=costs, strategy=one.strategy, tokens=workload.tokens_per_rank
        )
        for one in contenders
    }
    choices = _Choices(
        chosen=next(one for one in contenders if one.strategy == plan.memory.strategy),
        paper=paper,
        papers_choice=min((one for one in paper if one != "none"), key=lambda one: paper[one]),
        limit_bytes=limit,
    )
    return tuple(_terms(one, choices, workload) for one in contenders)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """What each strategy is held against.

    Args:
        paper: Eq. 10 of each.
    """

    chosen: Contender
    paper: Mapping[Strategy, float]
    papers_choice: Strategy
    limit_bytes: int


def _terms(one: Contender, choices: _Choices, workload: Workload) -> StrategyTerms:
    needed = total_bytes(one.memory)
    forward_degree, backward_degree = one.step.degrees
    lost = explain_strategy_loss(
        other=one.step,
        needed_bytes=needed,
        limit_bytes=choices.limit_bytes,
        best=choices.chosen.step,
    )
    peak = peak_bytes(
        workload=workload,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        strategy=one.strategy,
    )
    return StrategyTerms(
        strategy=one.strategy,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        step_seconds=one.step.seconds,
        needed_bytes=needed,
        peak_bytes=peak.device_bytes,
        host_bytes=peak.host_bytes,
        saving_ratio=one.memory.saving_ratio,
        fits=one.fits,
        is_chosen=one is choices.chosen,
        paper_seconds=choices.paper[one.strategy],
        is_paper_choice=one.strategy == choices.papers_choice,
        lost_because="" if one is choices.chosen else lost,
    )


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
        forward=_terms_explain(step.forward),
        backward=_terms_explain(step.backward),
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
        forward=_terms_explain(step.forward),
        backward=_terms_explain(step.backward),
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


def _terms_explain(phase: PhaseTime) -> PhaseTerms:
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
