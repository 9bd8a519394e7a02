"""One MoE layer inside a layout: its step at the best degrees."""

from moetune.domain.costs import Costs, Estimate
from moetune.domain.layer import Workload
from moetune.solve.choice import Bounds, DegreeChooser
from moetune.solve.layer_costs import layer_costs
from moetune.solve.layout_ranks import Group
from moetune.solve.phases import NOTHING
from moetune.solve.predict import StepTime


def best_moe_step(
    *, workload: Workload, costs: Costs, bounds: Bounds, num_nodes: int = 0
) -> StepTime:
    """Return the layer's fastest step within the bounds; everything is kept (strategy none).

    Args:
        workload: one micro-batch on the ranks that share the experts.
        num_nodes: that those ranks are spread over evenly; 0 for consecutive ranks.

    Raises:
        ProfileError: an operation was not measured.
    """
    layer = layer_costs(workload=workload, costs=costs, num_nodes=num_nodes)
    tokens = workload.tokens_per_rank
    forward, backward = DegreeChooser(costs=layer, bounds=bounds).best(tokens)
    return StepTime(forward=forward, backward=backward, overhead=layer.overhead(tokens=tokens))


def sum_over(group: Group, *, num_bytes: int, costs: Costs) -> Estimate:
    """Return one all-reduce over the group; 0 in a group of one."""
    if group.size == 1:
        return NOTHING
    return costs.collective(
        op="all_reduce", group_size=group.size, num_bytes=num_bytes, num_nodes=group.num_nodes
    )
