"""The costs of a workload's layer, in the way its ranks share the experts.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)
sequence shards   tokens are sharded around the layer: all-gather before it, reduce-scatter after
"""

from moetune.domain.costs import Costs
from moetune.domain.layer import Workload
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.tensor_parallel import SequenceShardCosts, TensorParallelCosts


def layer_costs(*, workload: Workload, costs: Costs, num_nodes: int = 0) -> LayerCosts:
    """Return the costs of the workload's layer.

    Args:
        num_nodes: that its ranks are spread over evenly; 0 for consecutive ranks.
    """
    kind: type[LayerCosts] = AllToAllCosts
    if workload.expert_parallel == "tensor":
        kind = SequenceShardCosts if workload.sequence_parallel else TensorParallelCosts
    return kind(
        layer=workload.layer,
        world_size=workload.world_size,
        dtype=workload.dtype,
        costs=costs,
        num_nodes=num_nodes,
        skew=workload.skew.mean,
        expert_shares=workload.skew.shares,
    )
