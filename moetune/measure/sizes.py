"""Sizes, curves and memory of points, and the experts' loads that a layer must follow."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.routing import LayerRouting
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    Point,
    RowsPoint,
    StepPoint,
)
from moetune.domain.units import dtype_bytes

_SIZES: Mapping[str, str] = MappingProxyType({
    "gemm": "rows", "rows": "rows", "attention": "num_sequences", "collective": "num_bytes",
    "copy": "num_bytes", "interference": "comm_bytes",
})  # fmt: skip
"""The field that changes along a curve of the profile, by kind of point."""
# These are query, key, value, result, and the gradient of each.
_ATTENTION_TENSORS = 8
# Tensors of memory-bound operations; tensors of a step: tokens, rows, results, and gradients.
_ROWS_TENSORS, _STEP_ROWS = 5, 8


def size_of(point: Point) -> int:
    """Return the point's place on its curve: rows, bytes or tokens."""
    if isinstance(point, StepPoint):
        return point.workload.tokens_per_rank
    size: int = getattr(point, _SIZES[point.kind])
    return size


def family(point: Point) -> object:
    """Return the key of points that form a curve over their sizes."""
    if isinstance(point, StepPoint):
        return point.workload.key
    return replace(point, **{_SIZES[point.kind]: 1})  # type: ignore[arg-type] # all are integers


def expert_shares(workload: Workload) -> tuple[float, ...] | None:
    """Return each expert's share of the rows; None if routing is balanced.

    Raises:
        InputError: the routing is a law, which has no loads of single experts; or there are more
            experts than d_model, so that random tokens cannot be steered.
    """
    routing = LayerRouting.of(workload.routing)
    shares = routing.loads.shares(workload.layer.top_k)
    if shares is None and workload.routing:
        raise InputError(
            f"the plan is for routing {workload.routing!r}, which says nothing of single experts",
            "plan with the loads of a file or a record to run the layer with them: --routing FILE",
        )
    if shares is not None and workload.layer.num_experts > workload.layer.d_model:
        raise InputError(
            f"{workload.layer.num_experts} experts for tokens of width {workload.layer.d_model}: "
            "random tokens cannot be made to follow the plan's routing",
            "plan with --routing balanced to run this layer",
        )
    return shares


def memory_bytes(point: Point) -> int:
    """Return the approximate bytes of the point's tensors on one rank."""
    match point:
        case GemmPoint():
            rows, weights = point.rows * (point.d_in + point.d_out), point.d_in * point.d_out
            num_bytes = point.num_experts * (rows + weights) * dtype_bytes(point.dtype)
        case AttentionPoint():
            heads = point.num_sequences * point.length * point.num_heads * point.head_dim
            num_bytes = _ATTENTION_TENSORS * heads * dtype_bytes(point.dtype)
        case RowsPoint():
            num_bytes = _ROWS_TENSORS * point.elements * dtype_bytes(point.dtype)
        case CollectivePoint():
            received = point.group_size if point.op == "all_gather" else 1
            num_bytes = point.in_flight * point.num_bytes * (1 + received)
        case CopyPoint():
            num_bytes = 2 * point.num_bytes * (1 + point.both_ways)
        case StepPoint():
            load, layer = point.workload, point.workload.layer
            weights = load.local_experts * layer.num_gemms * layer.d_model * layer.d_hidden
            rows = load.rows * (_STEP_ROWS * layer.d_model + layer.num_gemms * layer.d_hidden)
            num_bytes = (2 * weights + rows) * dtype_bytes(load.dtype)
        case _:  # interference, whose operations are small
            num_bytes = 0
    return num_bytes
