"""Measured points, the forms of GEMMs, and raw times of points. Statistics are derived."""

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
    """Return the form in which all experts have about equal rows."""
    return cast("EvenForm", form.removeprefix(_UNEVEN))


def uneven_form(form: GemmForm) -> GemmForm:
    """Return the form in which one expert has most of the rows."""
    return cast("GemmForm", f"{_UNEVEN}{even_form(form)}")


def hottest_share(num_experts: int) -> float:
    """Return the fullest expert's share of all rows in the uneven forms, above its equal share."""
    return 0.75 if num_experts == 2 else 0.5  # noqa: PLR2004 - half of the rows is an equal part


def expert_rows(form: GemmForm, rows: int, num_experts: int) -> tuple[int, ...]:
    """Return the rows of each expert, `rows` on average.

    Of every four experts of an even form, the first has a row more and the second a row less. In
    an uneven form this holds for the less loaded experts. A router gives odd and even numbers of
    rows equally often, and MKL takes an eighth longer for weight gradients of odd numbers. The
    measured number is round, so that equal rows would fill all tiles of a GPU's kernels.
    """
    if form == even_form(form):
        return tuple(_nearly(rows, num_experts))
    total, num_others = num_experts * rows, num_experts - 1
    mean = int(total * (1 - hottest_share(num_experts))) // num_others
    return (total - num_others * mean, *_nearly(mean, num_others))


def _nearly(rows: int, num_experts: int) -> list[int]:
    """Return uneven rows of experts whose mean is `rows`."""
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
"""A layer's forward pass and whole step, so small that the host's launches take all the time."""
ALONE_CHUNKS = 2
"""In a phase of at most this many chunks, an exchange is as fast as if alone on the link."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GemmPoint:
    """The experts' GEMM of one chunk, by the sizes of its forward form.

    forward (rows, d_in) x (d_in, d_out), grad_input (rows, d_out) x (d_out, d_in), and grad_weight
    (d_in, rows) x (rows, d_out). Each of `num_experts` experts runs it once, with about equal
    rows. In the "uneven_…" forms a single expert has `hottest_share` of all rows.

    Args:
        kernel: "" for the layer's default.
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
            parameters; on a CPU "adam" stands for both. "chunked_layer" (forward pass) and
            "chunked_layer_step" are a layer with experts in `rows` chunks, of `HOST_CHUNKS`. The
            layer is so small that its time is the host's time to launch it.
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

    All such groups, which together tile the cluster, run at the same time, as in training.

    Args:
        in_flight: collectives issued at once, as in a pipeline; the time is of a single collective.
        num_nodes: nodes that the ranks are spread over evenly; 0 if ranks fill node after node.
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
        """Multiply-accumulates of both GEMMs (backward: five), less half, which the mask skips."""
        once = self.num_sequences * self.length**2 * self.num_heads * self.head_dim // 2
        return (5 if self.backward else 2) * once


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CopyPoint:
    """A copy between host and device; `both_ways`: another copy runs in the other direction."""

    kind: Literal["copy"] = "copy"
    direction: Direction
    pinned: bool
    num_bytes: int
    both_ways: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class InterferencePoint:
    """The victim's operation while the other classes provably run; without others, its baseline.

    Args:
        comm_bytes: bytes of each exchange of "comm"; 0 for the session's representative size.
        is_alone: whether each exchange is alone on the link; else several run at once.
    """

    kind: Literal["interference"] = "interference"
    victim: ResourceClass
    others: tuple[ResourceClass, ...] = ()
    comm_bytes: int = 0
    is_alone: bool = field(default=False, metadata=UNLESS_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepPoint:
    """A layer's whole step in `degree` chunks, forward and backward, which plans predict as a sum.

    It shows how much a step differs from the sum of its operations on this machine.

    Args:
        workload: the layer's workload; its ranks are consecutive.
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
        seconds: time of one operation in each block, in order; for collectives the slowest rank's.
        num_iterations: operations in one block.
        marks: reasons to doubt the sample ("unstable", "drift", "busy", "stolen", "throttled").
        error: why there are no times ("out of memory"); empty for a good sample.
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

    Visits with marks count only if all have some. Of the remaining visits, the half with the
    smaller medians counts, rounded up. Disturbance makes a machine slower, so that half of the
    visits may be disturbed without an effect. Without disturbance the median of the returned times
    is the lower quartile of all: 0.7 standard deviations of a visit's median too short.
    """
    clean = [visit for visit in visits if not visit.marks] or list(visits)
    medians = [visit.median_seconds for visit in clean]
    slowest = sorted(medians)[(len(clean) - 1) // 2]
    return tuple(visit for visit, median in zip(clean, medians, strict=True) if median <= slowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A measured step of a layer, and the predicted sum of its operations.

    Args:
        chunks_seconds: both phases, predicted from the profile's operations.
        overhead_seconds: predicted time around the phases.
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
        """log(measured / predicted) of the phases, if the overhead takes its predicted time.

        If that leaves the phases less than half of the step, the overhead is wrong as well. The
        residual is then of the whole step.
        """
        left = self.measured_seconds - self.overhead_seconds
        if left < self.measured_seconds / 2:
            predicted = self.chunks_seconds + self.overhead_seconds
            return math.log(self.measured_seconds / predicted)
        return math.log(left / self.chunks_seconds)
