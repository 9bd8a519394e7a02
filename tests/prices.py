"""Costs of single operations, asked for by name."""

from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Estimate, LinearCost, seconds_if_known
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.samples import CollectiveOp, Direction


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


def gemm_line(costs: Costs, *, dtype: str) -> LinearCost | None:
    return costs.line(GemmKey(dtype))


def collective_line(
    costs: Costs, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
) -> LinearCost | None:
    return costs.line(CollectiveKey(op, group_size, num_nodes))
