"""What stages send each other."""

from moetune.domain.costs import Costs, Estimate
from moetune.domain.transformer import Transformer
from moetune.domain.units import dtype_bytes
from moetune.solve.layout_ranks import Group
from moetune.solve.layout_traits import OURS, Traits
from moetune.solve.phases import NOTHING, total


def send_time(
    *, hop: Group, tensor: Group, tokens: int, model: Transformer, dtype: str, costs: Costs,
    traits: Traits = OURS,
) -> Estimate:  # fmt: skip
    """Return one micro-batch's way from a stage to the next.

    Raises:
        ProfileError: no such send was measured.
    """
    num_bytes = tokens * model.moe.d_model * dtype_bytes(dtype)
    gathered = NOTHING
    if traits.splits_sends and tensor.size > 1:
        num_bytes //= tensor.size
        gathered = costs.collective(
            op="all_gather", group_size=tensor.size, num_bytes=num_bytes,
            num_nodes=tensor.num_nodes,
        )  # fmt: skip
    sent = costs.collective(
        op="send", group_size=hop.size, num_bytes=num_bytes, num_nodes=hop.num_nodes
    )
    return total(sent, gathered)
