"""Costs of a layer whose link is the loopback that one GPU was measured with."""

from dataclasses import replace

from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerKey, Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint
from moetune.fit.costs import costs_of
from moetune.fit.profile import fit_profile
from moetune.solve.layer.costs import AllToAllCosts, LayerCosts
from moetune.solve.layer.times import step_time

# A loopback has one rank; the same expert as one of two ranks is what a plan can be asked for.
_PRETENDED_RANKS = 2


def wired(profile: Profile, workload: Workload) -> LayerCosts:
    """Return the costs with the loopback taken for a link between two ranks."""
    samples = tuple(
        replace(sample, point=replace(sample.point, group_size=_PRETENDED_RANKS))
        if isinstance(sample.point, CollectivePoint)
        else sample
        for sample in profile.samples
    )
    fitted = fit_profile(
        name=profile.name, machine=profile.machine, fingerprint=profile.fingerprint,
        samples=samples,
    )  # fmt: skip
    layer = replace(workload.layer, num_experts=_PRETENDED_RANKS)
    key = LayerKey(layer=layer, num_ranks=_PRETENDED_RANKS, dtype=workload.dtype)
    return AllToAllCosts(key=key, costs=costs_of(fitted))


def layer_costs(profile: Profile, workload: Workload) -> LayerCosts:
    """Return the costs of a layer alone over the loopback, or on its ranks."""
    if workload.world_size == 1:
        return wired(profile, workload)
    return AllToAllCosts(key=workload.key, costs=costs_of(profile))


def predicted_seconds(costs: LayerCosts, workload: Workload, decision: Decision) -> float | None:
    """Return the predicted time of a step; None where the profile lacks an operation."""
    try:
        return step_time(
            costs=costs, tokens=workload.tokens_per_rank, strategy=decision.strategy,
            degree=decision.degree,
        ).seconds  # fmt: skip
    except MoetuneError:
        return None
