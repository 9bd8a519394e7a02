"""Replicas of hot experts where they shorten the step by more than they cost.

More replicas make the fullest rank emptier, and cost memory and the sums of their gradients, which
nothing hides. The search compares placements by an estimate that is too kind to all of them; the
best one that fits is predicted as any plan is.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layout import Layout
from moetune.domain.placement import PlacementChoice, ReplicaChoice
from moetune.domain.units import format_seconds, format_share
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.plan import LayerProblem
from moetune.solve.layer.replica_search import ReplicaPlacement, search_replicas
from moetune.solve.layer.strategies import RankedLayer

WORTH_REPLICAS = 0.02
"""Share of the best placement's step that replicas must save."""
_MOST_ADDED = 4
"""Places of each rank that are tried for replicas at most."""


def with_replicas(
    layer: LayerProblem, choice: PlacementChoice, shares: Sequence[float]
) -> tuple[RankedLayer | None, PlacementChoice]:
    """Return the candidates with replicas where they are worth it, and the choice with its words.

    Args:
        choice: of the placement of each expert in one place.
        shares: of all rows, of each expert.

    Returns:
        None in place of the candidates where the choice's stay.
    """
    if choice.placed_skew * (1 - WORTH_REPLICAS) <= 1:
        return None, choice
    too_many = sys.maxsize
    # Asked one by one, when it is known which number of places does not fit.
    smaller = (one for one in _placements(layer, choice, shares) if len(one.experts) < too_many)
    for placement in smaller:
        try:
            ranked = layer.ranked(placement.experts)
        except InfeasiblePlanError:
            too_many = len(placement.experts)
            continue
        found = _found(layer, choice, placement, ranked)
        if not found.is_taken:
            why = f"{choice.why}; {_lost(found, choice)}"
            return None, replace(choice, replicas=found, why=why)
        why = _won(found, choice)
        return ranked, replace(choice, experts=placement.experts, replicas=found, why=why)
    if too_many < sys.maxsize:
        choice = replace(choice, why=f"{choice.why}; replicas of hot experts do not fit")
    return None, choice


def _placements(
    layer: LayerProblem, choice: PlacementChoice, shares: Sequence[float]
) -> tuple[ReplicaPlacement, ...]:
    ranks = layer.inputs.world_size
    local = len(shares) // ranks

    def price(experts: tuple[int, ...], skew: float) -> float:
        """Return the step if all of it shrank with the fullest rank's rows, and the sums."""
        step_seconds = choice.placed_step_seconds * skew / choice.placed_skew
        return step_seconds + _sum_seconds(layer, experts)

    most = min(_MOST_ADDED, len(shares) - local - 1)
    return search_replicas(shares, ranks, most_added=most, price=price)


def _sum_seconds(layer: LayerProblem, experts: tuple[int, ...]) -> float:
    inputs = layer.inputs
    workload = inputs.workload(Layout.of_layer(inputs.expert_parallel, inputs.world_size), experts)
    costs = layer_costs(workload=workload, costs=layer.costs, num_nodes=layer.num_nodes)
    return costs.replica_sums().seconds


def _found(
    layer: LayerProblem, choice: PlacementChoice, placement: ReplicaPlacement, ranked: RankedLayer
) -> ReplicaChoice:
    step_seconds, num_experts = ranked.step.seconds, len(placement.numbers)
    return ReplicaChoice(
        is_taken=step_seconds < choice.placed_step_seconds * (1 - WORTH_REPLICAS),
        num_replicas=placement.num_replicas,
        added_places=(len(placement.experts) - num_experts) // layer.inputs.world_size,
        skew=placement.skew, step_seconds=step_seconds,
        sum_seconds=_sum_seconds(layer, placement.experts),
    )  # fmt: skip


def _won(found: ReplicaChoice, choice: PlacementChoice) -> str:
    """Return why hot experts have replicas."""
    saved = format_share(1 - found.step_seconds / choice.placed_step_seconds)
    more = "one more place" if found.added_places == 1 else f"{found.added_places} more places"
    return (
        f"with {found.words}, in {more} of each rank, the fullest has {found.skew:.2f} × the mean "
        f"rows, and {choice.placed_skew:.2f} with each expert in one place: they save {saved} of "
        f"the step, with {format_seconds(found.sum_seconds)} for the sums of their gradients"
    )


def _lost(found: ReplicaChoice, choice: PlacementChoice) -> str:
    """Return why hot experts have no replicas."""
    saved = 1 - found.step_seconds / choice.placed_step_seconds
    what = f"save {format_share(saved)}" if saved >= 0 else f"take {format_share(-saved)} more"
    return (
        f"{found.words} would leave {found.skew:.2f} × on it and {what} of the "
        f"step, with {format_seconds(found.sum_seconds)} for the sums of their gradients"
    )
