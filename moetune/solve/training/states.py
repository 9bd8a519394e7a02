"""Bytes of parameters, gradients and optimizer states on one device, by the stage of ZeRO.

From stage 1 on a replica has its shard of the states alone, from stage 2 on of the gradients, too,
and under stage 3 of the parameters. Dense parameters have dp·cp replicas, experts edp.
"""

from moetune.domain.optimizers import Optimizer
from moetune.domain.training import FoldedLayout
from moetune.solve.training.activations import ELEMENT

_SHARDS_GRADIENTS = 2
"""The ZeRO stage, and those above it."""
WHOLE_BLOCKS = 2
"""Of a sharded model that a device has at once: the one that is computed and the next one.

Megatron-FSDP takes twice a block as the size of its queues (`suggested_communication_unit_size`).
"""


def shard_of(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp


def state_bytes(
    layout: FoldedLayout, optimizer: Optimizer, dense: float, experts: float, *, on_host: float
) -> tuple[float, float, float]:
    """Return the bytes of so many parameters, of their gradients, and of their states.

    FSDP2 shards float32 parameters at every stage. At stage 2 what it gathers stays for the whole
    step, and gradients of micro-batches are added up whole
    (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `unsharded_accumulated_grad`).

    Args:
        on_host: share of the optimizer that the host keeps.
    """
    count, shard, zero = dense + experts, shard_of(layout, dense, experts), layout.zero
    is_whole = zero <= _SHARDS_GRADIENTS
    parameters = optimizer.parameter_bytes * (count if is_whole else shard)
    gradients = optimizer.gradient_bytes * (shard if zero >= _SHARDS_GRADIENTS else count)
    if optimizer.updates_parameters and is_whole:
        parameters = optimizer.parameter_bytes * shard + ELEMENT * count
        gradients += optimizer.gradient_bytes * count * (layout.pp > 1)
    return (
        parameters,
        gradients,
        (1 - on_host) * optimizer.state_bytes * (shard if zero else count),
    )


def gathered_bytes(layout: FoldedLayout, optimizer: Optimizer) -> int:
    """Return the bytes of a parameter that is sharded and yet whole for a while.

    Its gradient before it is reduced, from ZeRO stage 2 on, and under stage 3 the gathered
    parameter, in bfloat16.
    """
    if layout.zero < _SHARDS_GRADIENTS:
        return 0
    return optimizer.gradient_bytes + (ELEMENT if layout.zero > _SHARDS_GRADIENTS else 0)
