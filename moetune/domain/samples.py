"""Measured points, with the forms of GEMMs, and their raw times. Statistics are derived."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from moetune.domain.cluster import Group
from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError
from moetune.domain.kernels import KernelName
from moetune.domain.layer import Workload

EvenForm = Literal["forward", "grad_input", "grad_weight"]
GEMM_FORMS: tuple[EvenForm, ...] = get_args(EvenForm)
GemmForm = Literal[
    "forward", "grad_input", "grad_weight",
    "uneven_forward", "uneven_grad_input", "uneven_grad_weight",
]  # fmt: skip
_UNEVEN = "uneven_"


def even_form(form: GemmForm) -> EvenForm:
    """Return the form of experts that have about as many rows."""
    return cast("EvenForm", form.removeprefix(_UNEVEN))


def uneven_form(form: GemmForm) -> GemmForm:
    """Return the form in which one expert has most of the rows."""
    return cast("GemmForm", f"{_UNEVEN}{even_form(form)}")


def hottest_share(num_experts: int) -> float:
    """Return the share of all rows that one expert has in the uneven forms, more than its part."""
    return 0.75 if num_experts == 2 else 0.5  # noqa: PLR2004 - half of the rows is an equal part


def expert_rows(form: GemmForm, rows: int, num_experts: int) -> tuple[int, ...]:
    """Return the rows of each expert, `rows` on average.

    Of every four experts of an even form one has a row more, and one a row less. So it is with the
    less loaded ones of an uneven form. A router gives experts odd numbers of rows as often as even
    ones. MKL takes an eighth longer for the gradients of weights where they are odd. Tiles of a
    GPU's kernels are full where they are round, and a measured number is round.
    """
    if form == even_form(form):
        return tuple(_nearly(rows, num_experts))
    total, num_others = num_experts * rows, num_experts - 1
    mean = int(total * (1 - hottest_share(num_experts))) // num_others
    return (total - num_others * mean, *_nearly(mean, num_others))


def _nearly(rows: int, num_experts: int) -> list[int]:
    """Return numbers of rows that are as many on average."""
    numbers = [rows] * num_experts
    if rows > 1:
        for more in range(0, num_experts - 1, 4):
            numbers[more] += 1
            numbers[more + 1] -= 1
    return numbers


CollectiveOp = Literal["all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"]
"""torch's names."""
Direction = Literal["h2d", "d2h"]
ResourceClass = Literal["comp", "comm", "mem"]
Quality = Literal["good", "usable", "suspect"]

GOOD_SPREAD = 0.10
USABLE_SPREAD = 0.25
UNSTABLE = "unstable"
"""Mark of a visit whose few runs differ by more than `USABLE_SPREAD`."""
HOST_WIDTH = 16
HOST_CHUNKS = (1, 8)
LAUNCHES = ("chunked_layer", "chunked_layer_step")
"""A layer's forward pass and step, as long as the host needs to launch them."""
ALONE_CHUNKS = 2
"""In a phase of up to so many chunks, an exchange takes as long as alone on the link."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GemmPoint:
    """The experts' GEMM of one chunk, by the sizes of its forward form.

    forward (rows, d_in) x (d_in, d_out), grad_input (rows, d_out) x (d_out, d_in), and grad_weight
    (d_in, rows) x (rows, d_out). Each of `num_experts` experts runs it once, with about as many
    rows. In the "uneven_…" forms `hottest_share` of all rows are one expert's.

    Args:
        kernel: "" for what a layer takes by itself.
    """

    kind: Literal["gemm"] = "gemm"
    dtype: str
    product: GemmForm = "forward"
    num_experts: int = 1
    rows: int
    d_in: int
    d_out: int
    kernel: KernelName = field(default="", metadata=UNLESS_DEFAULT)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all experts together."""
        return self.num_experts * self.rows * self.d_in * self.d_out

    @property
    def expert_rows(self) -> tuple[int, ...]:
        """Rows of each expert."""
        return expert_rows(self.product, self.rows, self.num_experts)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RowsPoint:
    """A memory-bound operation on a (rows, width) tensor.

    Args:
        op: an activation with its bias ("gelu"), "gather", "scatter_add", "gate" (softmax and top-k
            over `width` experts), most also as "…_backward". "adam" is AdamW's step on rows · width
            parameters. "host_adam" is the same on the host's float32 copy, written back to the
            parameters; on a CPU "adam" stands for both. "chunked_layer", forward or as a whole
            "…_step", is a layer with experts in `rows` chunks, of `HOST_CHUNKS`. It is so small
            that its time is that of the host launching it.
    """

    kind: Literal["rows"] = "rows"
    op: str
    dtype: str
    rows: int
    width: int

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return self.rows * self.width


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CollectivePoint:
    """A collective over `group_size` ranks with `num_bytes` of input on each.

    Groups of that kind that tile the cluster work at the same time, as they do in training.

    Args:
        in_flight: number of them issued at once, as a pipeline does; the time is that of one.
        num_nodes: that the ranks are spread over evenly; 0 for ranks that fill node after node.
    """

    kind: Literal["collective"] = "collective"
    op: CollectiveOp
    group_size: int
    num_bytes: int
    in_flight: int = 1
    num_nodes: int = 0

    @property
    def group(self) -> Group:
        """The ranks and the nodes they are spread over."""
        return self.group_size, self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttentionPoint:
    """Causal self-attention of `num_sequences` sequences, without its projections.

    Args:
        backward: the gradient of query, key and value, instead of the result.
    """

    kind: Literal["attention"] = "attention"
    dtype: str
    num_sequences: int
    length: int
    num_heads: int
    head_dim: int
    backward: bool = False

    @property
    def macs(self) -> int:
        """Multiply-accumulates of both GEMMs (backward: five), of which the mask skips half."""
        once = self.num_sequences * self.length**2 * self.num_heads * self.head_dim // 2
        return (5 if self.backward else 2) * once


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CopyPoint:
    """A copy between host and device; both_ways: while one runs in the other direction."""

    kind: Literal["copy"] = "copy"
    direction: Direction
    pinned: bool
    num_bytes: int
    both_ways: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class InterferencePoint:
    """The victim's operation while the others provably run; without others, its baseline.

    Args:
        comm_bytes: of each exchange of "comm"; 0 for the representative size of the session.
        is_alone: each exchange is alone on the link, where others are several at once.
    """

    kind: Literal["interference"] = "interference"
    victim: ResourceClass
    others: tuple[ResourceClass, ...] = ()
    comm_bytes: int = 0
    is_alone: bool = field(default=False, metadata=UNLESS_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepPoint:
    """A layer's whole step in `degree` chunks forward and backward: the sum that plans predict.

    It shows by how much a step differs from the sum of its operations on this machine.

    Args:
        workload: its ranks are consecutive ones.
    """

    kind: Literal["step"] = "step"
    workload: Workload
    degree: int

    @property
    def group(self) -> Group:
        """The ranks that share the experts."""
        return self.workload.world_size, 0


Point = (
    GemmPoint
    | RowsPoint
    | AttentionPoint
    | CollectivePoint
    | CopyPoint
    | InterferencePoint
    | StepPoint
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Raw times of one point.

    Args:
        seconds: of one operation in each block, in order; of collectives the ranks' maximum.
        num_iterations: operations in one block.
        marks: reasons to doubt the sample ("unstable", "drift", "busy", "stolen", "throttled").
        error: why there are no times ("out of memory"), empty for a good sample.
    """

    point: Point
    seconds: tuple[float, ...]
    num_iterations: int = 1
    marks: tuple[str, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if not all(0 < time < math.inf for time in self.seconds):
            raise InputError("seconds must be positive and finite")
        if not self.seconds and not self.error:
            raise InputError("seconds is empty and no error says why")

    @property
    def median_seconds(self) -> float:
        """Median over the blocks."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over median; 0 for fewer than four blocks."""
        if len(self.seconds) < 4:  # noqa: PLR2004 - quartiles need four values
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / middle

    @property
    def quality(self) -> Quality:
        """Label from the spread and the marks."""
        if self.error or self.marks or self.spread > USABLE_SPREAD:
            return "suspect"
        return "good" if self.spread <= GOOD_SPREAD else "usable"


def undisturbed(visits: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the visits of one point that other programs disturbed least, in the given order.

    Visits with marks count only where all have some. Of the others the half with the smaller
    medians counts, rounded up. What disturbs a machine makes it slower, so half of the visits may
    be disturbed and the result is that of the others. Without any disturbance the median of their
    times is the lower quartile of all: 0.7 standard deviations of a visit's median too short.
    """
    clean = [visit for visit in visits if not visit.marks] or list(visits)
    medians = [visit.median_seconds for visit in clean]
    slowest = sorted(medians)[(len(clean) - 1) // 2]
    return tuple(visit for visit, median in zip(clean, medians, strict=True) if median <= slowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step of a layer as it was measured, and the sum of its operations.

    Args:
        chunks_seconds: of both phases, predicted from the profile's operations.
        overhead_seconds: around them, predicted.
    """

    workload: Workload
    degree: int
    chunks_seconds: float
    overhead_seconds: float
    measured_seconds: float

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise InputError(f"degree must be at least 1, got {self.degree}")
        times = self.chunks_seconds, self.measured_seconds
        if not all(0 < time < math.inf for time in times) or self.overhead_seconds < 0:
            raise InputError("the times of a step must be positive and finite")

    @property
    def residual(self) -> float:
        """log(measured / predicted) of the phases, the overhead taken as predicted.

        Where that would leave them less than half of the step, the overhead is wrong as well. The
        residual is then that of the whole step.
        """
        left = self.measured_seconds - self.overhead_seconds
        if left < self.measured_seconds / 2:
            predicted = self.chunks_seconds + self.overhead_seconds
            return math.log(self.measured_seconds / predicted)
        return math.log(left / self.chunks_seconds)
