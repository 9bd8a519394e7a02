"""The costs of a workload, by how its ranks share the experts."""

from moetune.domain.costs import Costs
from moetune.domain.layer import Workload
from moetune.solve.phases import LayerCosts
from moetune.solve.sharded_costs import ShardedCosts
from moetune.solve.summed_costs import SummedCosts


def layer_costs(*, workload: Workload, costs: Costs, num_nodes: int = 0) -> LayerCosts:
    """Return the costs of the workload's layer.

    Args:
        num_nodes: that its ranks are spread over evenly; 0 for consecutive ranks.
    """
    return _kind(workload)(
        layer=workload.layer,
        world_size=workload.world_size,
        dtype=workload.dtype,
        costs=costs,
        num_nodes=num_nodes,
    )


def _kind(workload: Workload) -> type[LayerCosts]:
    if workload.expert_parallel == "all_to_all":
        return LayerCosts
    return ShardedCosts if workload.sequence_parallel else SummedCosts
