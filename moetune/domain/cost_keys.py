"""Operations whose time is a curve over one size: the keys of `domain.costs`.

Points of samples (`domain.samples`) are such an operation at one size (`place_of`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from moetune.domain.cluster import Group
from moetune.domain.kernels import KernelName
from moetune.domain.samples import (
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmForm,
    GemmPoint,
    Point,
    RowsPoint,
)

Shape = tuple[int, int, int]
"""Experts, d_in and d_out of a GEMM."""


class GemmKey(NamedTuple):
    """GEMMs of `num_experts` experts; the size is rows of an expert, or MACs with default sizes."""

    dtype: str
    product: GemmForm = "forward"
    num_experts: int = 1
    d_in: int = 1
    d_out: int = 1
    kernel: KernelName = ""

    @property
    def shape(self) -> Shape:
        """Experts, d_in and d_out."""
        return self.num_experts, self.d_in, self.d_out

    @property
    def words(self) -> str:
        """The operation, as "forward GEMM of 2 × 512 × 2048 in float32"."""
        by = f" by {self.kernel}" if self.kernel else ""
        return f"{self.product} GEMM of {' × '.join(map(str, self.shape))} in {self.dtype}{by}"


class RowsKey(NamedTuple):
    """A memory-bound operation (`RowsPoint.op`); the size is the elements of its tensor."""

    op: str
    dtype: str

    @property
    def words(self) -> str:
        """The operation, as "gelu in float32"."""
        return f"{self.op} in {self.dtype}"


class CollectiveKey(NamedTuple):
    """A collective; the size is the input bytes of one rank."""

    op: CollectiveOp
    group_size: int
    num_nodes: int = 0
    in_flight: int = 1

    @property
    def group(self) -> Group:
        """The ranks and the nodes they are spread over."""
        return self.group_size, self.num_nodes

    @property
    def words(self) -> str:
        """The operation, as "all_to_all of 4 ranks on 2 nodes, 4 in flight"."""
        several = f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        spread = f" on {self.num_nodes} nodes" if self.num_nodes else ""
        return f"{self.op} of {self.group_size} ranks{spread}{several}"


class CopyKey(NamedTuple):
    """A copy between host and device; the size is bytes. `both_ways`: another copy runs back."""

    direction: Direction
    pinned: bool
    both_ways: bool = False

    @property
    def name(self) -> str:
        """The kind of copy, as "pinned h2d"."""
        return f"{'pinned' if self.pinned else 'pageable'} {self.direction}"

    @property
    def words(self) -> str:
        """The operation, as "pinned h2d copy, both ways"."""
        return f"{self.name} copy{', both ways' * self.both_ways}"


class AttentionKey(NamedTuple):
    """Causal self-attention without its projections; the size is the number of sequences."""

    dtype: str
    length: int
    num_heads: int
    head_dim: int
    backward: bool = False

    @property
    def words(self) -> str:
        """The operation, as "attention of 8 heads over 1024 tokens in float32"."""
        way = "backward attention" if self.backward else "attention"
        return f"{way} of {self.num_heads} heads over {self.length} tokens in {self.dtype}"


CostKey = GemmKey | RowsKey | CollectiveKey | CopyKey | AttentionKey
_KINDS: Mapping[type, tuple[str, str]] = {
    GemmKey: ("gemm", "rows"),
    RowsKey: ("rows", "elements"),
    CollectiveKey: ("collective", "bytes"),
    CopyKey: ("copy", "bytes"),
    AttentionKey: ("attention", "sequences"),
}
"""Name of each kind of operation, and unit of its sizes."""


def label_of(key: CostKey) -> str:
    """Return the name that seeds an operation's random draws; GEMMs of a dtype share a name."""
    name, _ = _KINDS[type(key)]
    return f"{name} {key.dtype}" if isinstance(key, GemmKey) else f"{name} {tuple(key)}"


def unit_of(key: CostKey) -> str:
    """Return the unit of an operation's sizes, as "rows"."""
    return _KINDS[type(key)][1]


def place_of(point: Point) -> tuple[CostKey, int] | None:
    """Return the operation and the size of a point; None if it times several operations."""
    match point:
        case GemmPoint():
            shape = point.num_experts, point.d_in, point.d_out
            return GemmKey(point.dtype, point.product, *shape, point.kernel), point.rows
        case RowsPoint():
            return RowsKey(point.op, point.dtype), point.elements
        case CollectivePoint():
            key = CollectiveKey(point.op, *point.group, point.in_flight)
            return key, point.num_bytes
        case CopyPoint():
            return CopyKey(point.direction, point.pinned, point.both_ways), point.num_bytes
        case AttentionPoint():
            heads = point.num_heads, point.head_dim
            key_of_shape = AttentionKey(point.dtype, point.length, *heads, point.backward)
            return key_of_shape, point.num_sequences
        case _:
            return None
