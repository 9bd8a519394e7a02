"""Chances that one of two choices is the faster one, under refits of the measurements."""

from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.uncertainty import LayerChoice, chance_of_faster
from moetune.workflows.plan import drawn_costs


def probability_faster(chosen: Plan, other: Plan, profile: Profile) -> float:
    """Return the share of refits under which the other plan's step is the shorter one.

    Args:
        chosen, other: of one layer, made with the profile.
    """
    return chance_of_faster(
        _choice(chosen, profile),
        _choice(other, profile),
        resamples=drawn_costs(profile, allow_modelled=other.inputs.pinned.allow_modelled),
        tokens=chosen.inputs.tokens_per_rank,
    )


def _choice(plan: Plan, profile: Profile) -> LayerChoice:
    costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    layer = layer_costs(workload=plan.workload, costs=costs)
    return layer, plan.decide(plan.inputs.tokens_per_rank)
