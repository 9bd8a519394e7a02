"""Chances that one of two choices is the faster one, under refits of the measurements."""

from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.uncertainty import TimedChoice, chance_of_faster
from moetune.solve.predict import plan_step
from moetune.workflows.plan import drawn_costs


def probability_faster(chosen: Plan, other: Plan, profile: Profile) -> float:
    """Return the share of refits under which the other plan's step is the shorter one.

    Args:
        chosen, other: of one layer, made with the profile.
    """
    return chance_of_faster(
        timed_choice(chosen, profile),
        timed_choice(other, profile),
        resamples=drawn_costs(profile, allow_modelled=other.inputs.pinned.allow_modelled),
        tokens=chosen.inputs.tokens_per_rank,
    )


def timed_choice(plan: Plan, profile: Profile) -> TimedChoice:
    """Return a layer's choice with its nominal time, as this version of moetune predicts it."""
    decision = plan.decide(plan.inputs.tokens_per_rank)
    costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    return TimedChoice(
        costs=layer_costs(workload=plan.workload, costs=costs),
        step=plan_step(plan=plan, costs=costs, decision=decision),
        order=decision.order,
    )
