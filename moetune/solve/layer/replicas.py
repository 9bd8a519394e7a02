"""Replicas of hot experts: how many of which, and on which ranks, for the shortest step.

More replicas make the fullest rank emptier, and cost memory and the sums of their gradients. The
next replica is always of the expert whose replicas have the most rows each, as in DeepSeek's EPLB,
whose serving has no gradients to price. Numbers of replicas are compared by an estimate that is too
kind to all of them, and the best one that fits is predicted as any plan is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.placement import EMPTY, PlacementChoice, ReplicaChoice
from moetune.domain.units import format_seconds, format_share
from moetune.solve.layer.expert_groups import group_replicas
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.plan import LayerProblem
from moetune.solve.layer.strategies import RankedLayer

WORTH_REPLICAS = 0.02
"""Share of the best placement's step that replicas must save."""
_MOST_ADDED = 8
"""Places that ranks get at most for replicas."""
_STEP = 1.25
"""Ratio of a number of replicas to the next one that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """A placement with so many replicas.

    Args:
        experts: of each place.
        skew: rows of the fullest rank over the mean.
        sum_seconds: of the replicas' gradients, in a backward pass.
    """

    experts: tuple[int, ...]
    num_replicas: int
    skew: float
    sum_seconds: float

    def estimate_seconds(self, choice: PlacementChoice) -> float:
        """Return the step if all of it shrank with the fullest rank's rows."""
        return choice.placed_step_seconds * self.skew / choice.placed_skew + self.sum_seconds


def place_replicas(
    shares: Sequence[float], num_ranks: int, num_replicas: int
) -> tuple[int, ...] | None:
    """Return the expert of each place, with so many replicas of the hottest experts.

    Args:
        shares: of all rows, of each expert.
        num_replicas: places beyond one for each expert; those of a rank are rounded up.

    Returns:
        None where the experts have all the replicas that they can have, one on each rank, or no
        such groups were found.
    """
    numbers = [1] * len(shares)
    for _ in range(num_replicas):
        hot = [expert for expert, number in enumerate(numbers) if number < num_ranks]
        if not hot:
            return None
        numbers[max(hot, key=lambda one: (shares[one] / numbers[one], -one))] += 1
    experts = [expert for expert, number in enumerate(numbers) for _ in range(number)]
    loads = [shares[expert] / numbers[expert] for expert in experts]
    num_empty = -len(experts) % num_ranks
    experts += range(-num_empty, 0)
    found = group_replicas([*loads, *[0.0] * num_empty], experts, num_ranks)
    if found is None:
        return None
    ranks = (sorted(experts[at] for at in group) for group in found.groups)
    return tuple(max(expert, EMPTY) for rank in ranks for expert in rank)


def with_replicas(
    layer: LayerProblem, choice: PlacementChoice, shares: Sequence[float]
) -> tuple[RankedLayer | None, PlacementChoice]:
    """Return the candidates with replicas where they are worth it, and the choice with its words.

    Args:
        choice: of the placement of each expert in one place.

    Returns:
        None in place of the candidates where the choice's stay.
    """
    if choice.placed_skew * (1 - WORTH_REPLICAS) <= 1:
        return None, choice
    tried = sorted(_candidates(layer, shares), key=lambda one: one.estimate_seconds(choice))
    is_too_large = False
    for placement in tried:
        try:
            ranked = layer.ranked(placement.experts)
        except InfeasiblePlanError:
            is_too_large = True
            continue
        found = _choice(placement, choice, ranked.step.seconds, len(shares), layer)
        if not found.is_taken:
            return None, replace(
                choice, replicas=found, why=f"{choice.why}; {_lost(found, choice)}"
            )
        why = _won(found, choice)
        return ranked, replace(choice, experts=placement.experts, replicas=found, why=why)
    if is_too_large:
        choice = replace(choice, why=f"{choice.why}; replicas of hot experts do not fit")
    return None, choice


def _candidates(layer: LayerProblem, shares: Sequence[float]) -> Iterator[ReplicaPlacement]:
    """Yield placements with more and more replicas, as long as the fullest rank gets emptier."""
    inputs = layer.inputs
    layout = Layout.of_layer(inputs.expert_parallel, inputs.world_size)
    ranks, number, least = layout.expert_ranks, 1, float("inf")
    most = min(_MOST_ADDED, len(shares) - len(shares) // ranks - 1) * ranks
    while number <= most:
        experts = place_replicas(shares, ranks, number)
        if experts is not None:
            workload = inputs.workload(layout, experts)
            skew = workload.skew.mean
            if skew < least:
                least = skew
                yield ReplicaPlacement(
                    experts=experts, num_replicas=number, skew=skew,
                    sum_seconds=_sum_seconds(layer, workload),
                )  # fmt: skip
        if least * (1 - WORTH_REPLICAS) <= 1:
            return
        number = max(number + 1, int(number * _STEP))


def _sum_seconds(layer: LayerProblem, workload: Workload) -> float:
    costs = layer_costs(workload=workload, costs=layer.costs, num_nodes=layer.num_nodes)
    return costs.replica_sums().seconds


def _choice(
    placement: ReplicaPlacement,
    choice: PlacementChoice,
    step_seconds: float,
    num_experts: int,
    layer: LayerProblem,
) -> ReplicaChoice:
    ranks = layer.inputs.world_size
    return ReplicaChoice(
        is_taken=step_seconds < choice.placed_step_seconds * (1 - WORTH_REPLICAS),
        num_replicas=placement.num_replicas,
        added_places=(len(placement.experts) - num_experts) // ranks,
        skew=placement.skew, least_skew=1.0, step_seconds=step_seconds,
        sum_seconds=placement.sum_seconds,
    )  # fmt: skip


def _won(found: ReplicaChoice, choice: PlacementChoice) -> str:
    """Return why hot experts have replicas."""
    saved = format_share(1 - found.step_seconds / choice.placed_step_seconds)
    return (
        f"with {_replicas(found)} of hot ones the fullest rank has {found.skew:.2f} × the mean "
        f"rows, and {choice.placed_skew:.2f} with each expert in one place: they save {saved} of "
        f"the step, with {format_seconds(found.sum_seconds)} for the sums of their gradients"
    )


def _lost(found: ReplicaChoice, choice: PlacementChoice) -> str:
    """Return why hot experts have no replicas."""
    saved = 1 - found.step_seconds / choice.placed_step_seconds
    what = f"save {format_share(saved)}" if saved >= 0 else f"take {format_share(-saved)} more"
    return (
        f"{_replicas(found)} of hot ones would leave {found.skew:.2f} × on it and {what} of the "
        f"step, with {format_seconds(found.sum_seconds)} for the sums of their gradients"
    )


def _replicas(found: ReplicaChoice) -> str:
    return f"{found.num_replicas} replica{'s' * (found.num_replicas > 1)}"
