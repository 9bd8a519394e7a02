"""Memory that a point's tensors take on one rank."""

from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    StepPoint,
)
from moetune.domain.units import dtype_bytes

# Query, key, value, result, and the gradient of each.
_ATTENTION_TENSORS = 8
_ROWS_TENSORS = 5
# Tokens, rows sent and received, results, and the gradient of each.
_STEP_ROWS = 8


def memory_bytes(point: Point) -> int:
    """Return roughly the bytes of the point's tensors on one rank."""
    if isinstance(point, CollectivePoint):
        received = point.group_size if point.op == "all_gather" else 1
        return point.in_flight * point.num_bytes * (1 + received)
    if isinstance(point, CopyPoint):
        return 2 * point.num_bytes * (1 + point.both_ways)
    if isinstance(point, InterferencePoint):
        return 0
    dtype = point.workload.dtype if isinstance(point, StepPoint) else point.dtype
    return _elements(point) * dtype_bytes(dtype)


def _elements(point: GemmPoint | RowsPoint | AttentionPoint | StepPoint) -> int:
    if isinstance(point, GemmPoint):
        elements = point.rows * (point.d_in + point.d_out) + point.d_in * point.d_out
        return point.num_experts * elements
    if isinstance(point, RowsPoint):
        return _ROWS_TENSORS * point.elements
    if isinstance(point, AttentionPoint):
        tokens = point.num_sequences * point.length
        return _ATTENTION_TENSORS * tokens * point.num_heads * point.head_dim
    load, layer = point.workload, point.workload.layer
    weights = load.local_experts * layer.num_gemms * layer.d_model * layer.d_hidden
    rows = load.rows * (_STEP_ROWS * layer.d_model + layer.num_gemms * layer.d_hidden)
    return 2 * weights + rows
