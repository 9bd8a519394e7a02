"""Plan of a layer whose experts are placed by their loads, if that is worth it.

Experts are grouped so that the fullest rank, for which the others wait, has the fewest rows. A
routing record has the experts' loads only, not the ranks that their rows come from. So transfers
follow the fullest rank's rows, as in all plans for uneven routing.

Groups are balanced k-way partitions: longest processing time first with equal numbers in a group,
improved by swaps. For log-normal loads of spread 1 the fullest group exceeds the possible minimum
by 0.15 % on the mean of 400 draws of 8 experts on 2 ranks (4.4 % at most). With 16 experts on 4
ranks it is 0.3 % (3.2 %), with 64 on 4 it is 0.004 %.

Source: Graham (1969) for the first, Babel, Kellerer and Kotov (1998) for equal numbers.
"""

import heapq
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.placement import LayerPlacement, PlacementChoice
from moetune.domain.routing import LayerRouting
from moetune.solve.layer.plan import LayerProblem, SolvedLayer
from moetune.solve.layer.strategies import RankedLayer

WORTH_PLACING = 0.02
"""Share of the step that a placement must save; smaller gains are within the predictions' error."""
_SAME = 1e-9
Groups = tuple[tuple[int, ...], ...]
"""Experts of each group."""
_LOWER = 1e-12
"""Least share of the fullest group's load that a swap must remove, to exceed rounding."""


def solve_placed(layer: LayerProblem) -> SolvedLayer:
    """Return the fastest plan, with placed experts if that saves `WORTH_PLACING` of the step.

    Nothing is placed without loads of the experts, on one rank, or if the natural order is pinned.

    Raises:
        InfeasiblePlanError: nothing fits, with no placement.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    inputs = layer.inputs
    workload = inputs.workload(Layout.of_layer(inputs.expert_parallel, inputs.world_size))
    loads = LayerRouting.of(workload.routing).loads
    loads.check(workload.layer.num_experts)
    shares = loads.shares(workload.layer.top_k)
    is_natural = inputs.pinned.expert_placement == "natural"
    if shares is None or is_natural or workload.world_size == 1:
        return layer.solved(layer.ranked())
    return _better(layer, workload, shares)


def place_experts(shares: Sequence[float], ranks: int, *, natural_skew: float) -> LayerPlacement:
    """Return the placement of experts by shares of rows; the natural order if none is better."""
    least = least_fullest(shares, ranks) * ranks if ranks > 1 else 1.0
    natural = LayerPlacement(
        natural_skew=natural_skew, placed_skew=natural_skew, least_skew=min(natural_skew, least)
    )
    if natural_skew <= least * (1 + _SAME):
        return natural
    groups = group_experts(shares, ranks)
    placed_skew = max(sum(shares[expert] for expert in group) for group in groups) * ranks
    if placed_skew >= natural_skew * (1 - _SAME):
        return natural
    return replace(
        natural, experts=tuple(expert for group in groups for expert in group),
        placed_skew=placed_skew, least_skew=min(placed_skew, least),
    )  # fmt: skip


def _better(layer: LayerProblem, workload: Workload, shares: tuple[float, ...]) -> SolvedLayer:
    natural: RankedLayer | None = None
    with suppress(InfeasiblePlanError):
        natural = layer.ranked()
    best = place_experts(shares, workload.world_size, natural_skew=workload.skew.mean)
    placed = natural if natural is not None and not best.experts else layer.ranked(best.experts)
    choice = PlacementChoice(
        **{item.name: getattr(best, item.name) for item in fields(best)},
        natural_step_seconds=None if natural is None else natural.step.seconds,
        placed_step_seconds=placed.step.seconds, why="",
    )  # fmt: skip
    is_worth_it = natural is None or (choice.gain or 0.0) > WORTH_PLACING
    experts = best.experts if is_worth_it else ()
    chosen = placed if natural is None or is_worth_it else natural
    return layer.solved(chosen, replace(choice, experts=experts))


def group_experts(loads: Sequence[float], num_groups: int) -> Groups:
    """Return equal, ascending groups of experts that make the fullest group's load small."""
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    sorted_loads = [loads[expert] for expert in order]
    places = _swapped(sorted_loads, _longest_first(sorted_loads, num_groups))
    return tuple(sorted(tuple(sorted(order[place] for place in group)) for group in places))


def least_fullest(loads: Sequence[float], num_groups: int) -> float:
    """Return a lower bound on the load of the fullest of equal groups.

    It is the largest of three bounds. The first is the mean. In the second, the largest expert is
    grouped with the smallest experts. In the third, two of the first P + 1 experts share a group,
    with the smallest experts.
    """
    loads = sorted(loads, reverse=True)
    size = len(loads) // num_groups
    mean = sum(loads) / num_groups
    with_smallest = loads[0] + sum(loads[len(loads) - size + 1 :])
    if size == 1:
        return max(mean, with_smallest)
    two = loads[num_groups - 1] + loads[num_groups]
    return max(mean, with_smallest, two + sum(loads[len(loads) - size + 2 :]))


def _longest_first(loads: Sequence[float], num_groups: int) -> list[list[int]]:
    """Return groups filled from the largest load on, each into the emptiest group with room."""
    size = len(loads) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    open_groups = [(0.0, group) for group in range(num_groups)]
    for expert, load in enumerate(loads):
        before, emptiest = heapq.heappop(open_groups)
        groups[emptiest].append(expert)
        if len(groups[emptiest]) < size:
            heapq.heappush(open_groups, (before + load, emptiest))
    return groups


def _swapped(loads: Sequence[float], groups: list[list[int]]) -> list[list[int]]:
    """Return the groups after the best swap with the fullest group, repeated until none helps.

    Every swap lowers the fullest group, and leaves its partner below the fullest group's old load.
    """
    all_loads = np.array(loads, float)
    sums = [sum(loads[place] for place in group) for group in groups]
    while True:
        fullest = max(range(len(groups)), key=lambda group: (sums[group], -group))
        after = _after_swaps(all_loads[np.array(groups)], np.array(sums), fullest)
        best = after.argmin()
        if not after.flat[best] < sums[fullest] * (1 - _LOWER):
            return groups
        partner, mine, theirs = (int(place) for place in np.unravel_index(best, after.shape))
        pair = groups[fullest][mine], groups[partner][theirs]
        groups[partner][theirs], groups[fullest][mine] = pair
        for group in (fullest, partner):
            sums[group] = sum(loads[place] for place in groups[group])


def _after_swaps(loads: Floats, sums: Floats, fullest: int) -> Floats:
    """Return the larger load of two groups after each swap of loads, [other, mine, theirs]."""
    moved = loads[fullest][:, None] - loads[:, None, :]
    after: Floats = np.maximum(sums[fullest] - moved, sums[:, None, None] + moved)
    after[moved <= 0] = np.inf
    return after
