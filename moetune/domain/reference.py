"""Tables of a profile: times that others measured, or that a rule derives, each with its source.

A table is one block of a profile file. Its label and source say whether its times were published,
were measured on another machine of the kind, or follow a rule. A plan can report this (`Doubt`).
Samples are this machine's measurements; where both have an operation, samples count
(`fit.pool`).
"""

from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError, check_positive
from moetune.domain.samples import CollectiveOp, GemmForm
from moetune.domain.units import check_product_dtype

Label = Literal["measured", "published", "modelled"]
TransferPhase = Literal["dispatch", "combine"]
Rows = tuple[tuple[float, ...], ...]


def _check_rows(rows: Rows, width: int) -> None:
    """Raise InputError unless all rows are positive and have that many numbers."""
    for row in rows:
        if len(row) != width:
            raise InputError(f"a row of points must have {width} numbers, got {len(row)}")
        if not all(number > 0 for number in row):
            raise InputError("sizes and seconds must be positive")
    if not rows:
        raise InputError("points is empty")


def _check_spread(spread: float) -> None:
    if not 0 <= spread <= 1:
        raise InputError(f"spread must be from 0 to 1, got {spread}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """GEMMs of one dtype or 8-bit format: rows of (rows of an expert, d_in, d_out, seconds).

    Args:
        num_experts: experts that one call multiplies, as in `GemmPoint`.
        source: who measured it, or the rule that it follows.
        spread: standard deviation of the logarithm of an error that all its times share.
    """

    kind: Literal["gemm"] = "gemm"
    label: Label
    source: str
    dtype: str
    product: GemmForm = "forward"
    num_experts: int = 1
    spread: float = 0.0
    points: Rows

    def __post_init__(self) -> None:
        check_product_dtype(self.dtype)
        _check_rows(self.points, 4)
        _check_spread(self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """One collective over one group: rows of (input bytes of one rank, seconds)."""

    kind: Literal["collective"] = "collective"
    label: Label
    source: str
    op: CollectiveOp
    group_size: int
    num_nodes: int = 0
    spread: float = 0.0
    points: Rows

    def __post_init__(self) -> None:
        if self.group_size < 2:  # noqa: PLR2004 - one rank has nobody to talk to
            raise InputError(f"group_size must be at least 2, got {self.group_size}")
        _check_rows(self.points, 2)
        _check_spread(self.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherTable:
    """One phase of a library that exchanges tokens: rows of (bytes of one rank, seconds).

    Args:
        dispatcher: the library's name ("deepep").
        num_sms: multiprocessors that it takes from computation.
        points: a rank's bytes count each of its tokens once for each rank that the token reaches.
    """

    kind: Literal["dispatcher"] = "dispatcher"
    label: Label
    source: str
    dispatcher: str
    phase: TransferPhase
    group_size: int
    num_nodes: int = 0
    num_sms: int
    spread: float = 0.0
    points: Rows

    def __post_init__(self) -> None:
        if self.group_size < 2 or self.num_sms < 0:  # noqa: PLR2004 - as above
            raise InputError("group_size must be at least 2, and num_sms not negative")
        _check_rows(self.points, 2)
        _check_spread(self.spread)


Table = GemmTable | CollectiveTable | DispatcherTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Rule for groups that no table has: of more nodes, or of more ranks in one node.

    A node moves `devices_per_node · nic_bytes_per_second · efficiency` bytes a second. In an
    all-to-all of N nodes this rate is divided by `1 + loss_per_node · N`. The bytes move after
    `startup_seconds + startup_seconds_per_node · N`. See `fit.collectives` for the bytes of each
    operation that cross nodes.

    Args:
        nic_bytes_per_second: rate of a device's share of its node's network cards, one way.
        most_nodes: most nodes that the loss was seen with; more nodes have the same loss.
        posted_chunk_seconds: time of a chunk of tokens that DeepEP sends to another node, where a
            thread of the host posts it (EFA). It is 0 where GPUs post their chunks.
        spread: as in `GemmTable`, for the times that the rule predicts.
    """

    label: Label = "modelled"
    source: str
    nic_bytes_per_second: float
    efficiency: float = 1.0
    loss_per_node: float = 0.0
    most_nodes: int = 1
    startup_seconds: float = 0.0
    startup_seconds_per_node: float = 0.0
    posted_chunk_seconds: float = field(default=0.0, metadata=UNLESS_DEFAULT)
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.nic_bytes_per_second <= 0 or not 0 < self.efficiency <= 1:
            raise InputError("nic_bytes_per_second must be above 0, and efficiency at most 1")
        rest = (
            self.loss_per_node, self.startup_seconds, self.startup_seconds_per_node,
            self.posted_chunk_seconds,
        )  # fmt: skip
        if min(rest) < 0:
            raise InputError("a loss, a start-up and a chunk's time must be at least 0")
        check_positive(self, "most_nodes")
        _check_spread(self.spread)

    def bytes_per_second(self, num_nodes: int = 0) -> float:
        """Return the rate of a device's share of the cards, less the loss if all nodes send."""
        loss = self.loss_per_node * min(num_nodes, self.most_nodes)
        return self.nic_bytes_per_second * self.efficiency / (1 + loss)

    def startup(self, num_nodes: int) -> float:
        """Return the seconds before the first byte and after the last byte, for `num_nodes`."""
        return self.startup_seconds + self.startup_seconds_per_node * num_nodes
