"""Candidates of a layer's plan: its strategies and degrees, best first."""

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs
from moetune.domain.layout import Layout
from moetune.domain.request import PlanInputs
from moetune.solve.layer.memory import limit_of
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.strategies import RankedLayer, choose_strategy


def rank_layer(
    *,
    inputs: PlanInputs,
    costs: Costs,
    bounds: Bounds,
    device_memory_bytes: int,
    num_nodes: int = 0,
    placement: tuple[int, ...] = (),
) -> RankedLayer:
    """Return the candidates of a layer's plan, best first, of which `solve_plan` takes the first.

    Args:
        costs: nominal costs of the profile that the inputs name.
        bounds: what is pinned; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit where the inputs set none.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.
        placement: expert of each place; empty for the natural order.

    Raises:
        InfeasiblePlanError: a pinned degree that the tokens or bounds do not allow, or more
            memory than there is.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    bounds.check_degrees(inputs.tokens_per_rank)
    layout = Layout.of_layer(inputs.expert_parallel, inputs.world_size)
    workload = inputs.workload(layout, placement)
    return choose_strategy(
        workload=workload,
        costs=layer_costs(workload=workload, costs=costs, num_nodes=num_nodes),
        bounds=bounds,
        limit_bytes=limit_of(inputs, device_memory_bytes=device_memory_bytes),
    )
