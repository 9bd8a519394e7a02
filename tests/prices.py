"""Costs of single operations, asked for by name."""

from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, CostKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, LinearCost, seconds_if_known
from moetune.domain.samples import CollectiveOp, Direction, GemmForm


def gemm(
    costs: Costs, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int,
    d_out: int,
) -> Estimate:  # fmt: skip
    return costs.seconds(GemmKey(dtype, product, num_experts, d_in, d_out), rows)


def rows_op(costs: Costs, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
    return seconds_if_known(costs, RowsKey(op, dtype), rows * width)


def collective(
    costs: Costs, *, op: CollectiveOp, group_size: int, num_bytes: float, in_flight: int = 1,
    num_nodes: int = 0,
) -> Estimate:  # fmt: skip
    return costs.seconds(CollectiveKey(op, group_size, num_nodes, in_flight), num_bytes)


def attention(
    costs: Costs, *, dtype: str, num_sequences: float, length: int, num_heads: int, head_dim: int,
    backward: bool,
) -> Estimate | None:  # fmt: skip
    key = AttentionKey(dtype, length, num_heads, head_dim, backward)
    return seconds_if_known(costs, key, num_sequences)


def copy(costs: Costs, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
    return costs.seconds(CopyKey(direction, pinned), num_bytes)


def line_of(costs: Costs, key: CostKey) -> LinearCost:
    """Return the α–β line of an operation that has one."""
    alpha, large = costs.seconds(key, 0.0).seconds, 1e15
    beta = (costs.seconds(key, large).seconds - alpha) / large
    return LinearCost(alpha_seconds=alpha, beta_seconds=beta)
