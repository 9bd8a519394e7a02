"""Plan of a layer with its experts placed by their loads, where that is worth it.

Experts are grouped so that the fullest rank has the fewest rows, for which the others wait. The
record of a routing has loads of experts alone, not which ranks their rows come from: transfers
follow the fullest rank's rows, as in all plans for uneven routing.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.placement import LayerPlacement, PlacementChoice
from moetune.domain.routing import LayerRouting
from moetune.domain.units import format_share
from moetune.solve.layer.expert_groups import group_experts, least_fullest
from moetune.solve.layer.plan import LayerProblem, SolvedPlan
from moetune.solve.layer.strategies import RankedLayer

WORTH_PLACING = 0.02
"""Share of the step that a placement must save: less is within the predictions' error."""
_SAME = 1e-9


def solve_placed(layer: LayerProblem) -> SolvedPlan:
    """Return the fastest plan, with experts placed where that saves `WORTH_PLACING` of the step.

    Without loads of the experts, on one rank, or with the natural order pinned, nothing is placed.

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
    """Return the placement of a layer's experts; the natural order where none found is better.

    Args:
        shares: of the rows, of each expert.
        natural_skew: rows of the fullest rank over the mean in the natural order.
    """
    least = least_fullest(shares, ranks) * ranks if ranks > 1 else 1.0
    natural = LayerPlacement(
        natural_skew=natural_skew, placed_skew=natural_skew, least_skew=min(natural_skew, least)
    )
    if natural_skew <= least * (1 + _SAME):
        return natural
    found = group_experts(shares, ranks)
    placed_skew = found.fullest * ranks
    if placed_skew >= natural_skew * (1 - _SAME):
        return natural
    return replace(
        natural, experts=tuple(expert for group in found.groups for expert in group),
        placed_skew=placed_skew, least_skew=min(placed_skew, least),
    )  # fmt: skip


def _better(layer: LayerProblem, workload: Workload, shares: tuple[float, ...]) -> SolvedPlan:
    natural = _ranked_if_feasible(layer)
    found = place_experts(shares, workload.world_size, natural_skew=workload.skew.mean)
    placed = natural if natural is not None and not found.experts else layer.ranked(found.experts)
    choice = PlacementChoice(
        **{item.name: getattr(found, item.name) for item in fields(found)},
        natural_step_seconds=None if natural is None else natural.step.seconds,
        placed_step_seconds=placed.step.seconds, why="",
    )  # fmt: skip
    is_worth_it = natural is None or (choice.gain or 0.0) > WORTH_PLACING
    experts = found.experts if is_worth_it else ()
    choice = replace(choice, experts=experts, why=_reason(choice))
    chosen = placed if natural is None or is_worth_it else natural
    return layer.solved(chosen, choice)


def _ranked_if_feasible(layer: LayerProblem) -> RankedLayer | None:
    """Return the natural order's candidates; None where none fits."""
    try:
        return layer.ranked()
    except InfeasiblePlanError:
        return None


def _reason(choice: PlacementChoice) -> str:
    """Return why experts are placed so, or keep their order.

    Args:
        choice: the best placement that was found; without experts none is better than the order.
    """
    before, after = f"{choice.natural_skew:.2f}", f"{choice.placed_skew:.2f}"
    if choice.gain is None:
        return f"in their order they do not fit: the fullest rank has {before} × the mean rows"
    if not choice.experts:
        return (
            f"no placement was found with fewer than {before} × the mean rows on the fullest rank"
        )
    gain = format_share(choice.gain)
    if choice.gain > WORTH_PLACING:
        return (
            f"the fullest rank has {after} × the mean rows instead of {before}, saving {gain} of "
            "the step"
        )
    least = format_share(WORTH_PLACING, digits=0)
    return (
        f"the best placement has {after} × the mean rows on the fullest rank instead of {before}, "
        f"and saves {gain} of the step: less than {least} is within the predictions' error"
    )
