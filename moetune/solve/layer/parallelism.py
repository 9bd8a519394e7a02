"""The costs of a workload's layer, in the way its ranks share the experts.

all to all        tokens travel to the experts and back: two collectives a chunk
tensor parallel   every rank has all tokens, and the outputs are all-reduced (PPMoE §3.3, Eq. 5)
sequence shards   tokens are sharded around the layer: all-gather before it, reduce-scatter after
"""

from moetune.domain.constraints import Dispatcher
from moetune.domain.costs import Costs
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Workload
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.tensor_parallel import SequenceShardCosts, TensorParallelCosts


def layer_costs(
    *,
    workload: Workload,
    costs: Costs,
    num_nodes: int = 0,
    dispatcher: Dispatcher = "flat",
) -> LayerCosts:
    """Return the costs of the workload's layer.

    Args:
        num_nodes: that its ranks are spread over evenly; 0 for consecutive ranks.
        dispatcher: of all-to-alls.
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
        dispatcher=dispatcher,
        quantization=workload.recipe,
        skew=workload.skew.mean,
        expert_shares=workload.skew.shares,
    )


def is_hierarchy_measured(*, workload: Workload, costs: Costs, num_nodes: int = 0) -> bool:
    """Return whether exchanges in two steps were measured among the workload's ranks.

    Args:
        num_nodes: as in `layer_costs`.
    """
    if workload.expert_parallel == "tensor" or workload.world_size == 1 or workload.quantization:
        return False
    try:
        found = costs.collective(
            op="all_to_all_2d", group_size=workload.world_size,
            num_bytes=workload.payload_bytes, num_nodes=num_nodes,
        )  # fmt: skip
    except ProfileError:
        return False
    return found.trust != "modelled"
