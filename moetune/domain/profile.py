"""A profile: everything known about one machine's speed, with the keys of `profiles/*.toml`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.cost_keys import CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import LinearCost
from moetune.domain.document import UNLESS_DEFAULT, decode_schema, digest, encode
from moetune.domain.errors import InputError, check_positive
from moetune.domain.interference import Interference
from moetune.domain.reference import Network, Table
from moetune.domain.samples import CollectiveOp, Direction, Quality, Sample, StepRecord
from moetune.domain.units import check_product_dtype
from moetune.domain.withdrawn import without_unread_points

PROFILE_SCHEMA = 1
Provenance = Literal["measured", "published", "modelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Error of predictions at points left out of the fit, and the range of measured sizes.

    Args:
        median, p95: leave-one-out |relative error|.
        low, high: range of the measured sizes, in bytes or MACs.
        alpha_seconds, beta_seconds: bootstrap 90 % intervals of the line.
    """

    num_points: int
    median: float
    p95: float
    low: float
    high: float
    quality: Quality
    alpha_seconds: tuple[float, float]
    beta_seconds: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectGroup:
    """A group of operations whose measurements predict each other badly, such as "all_to_all".

    Args:
        median_error, p95_error: errors of its worst fits, as in `FitError`; None if no fit has an
            error, but the samples vary too much.
    """

    group: str
    median_error: float | None = None
    p95_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileQuality:
    """Quality of a measured profile: that of its worst group of operations."""

    label: Quality
    suspect: tuple[SuspectGroup, ...] = ()


class _AlphaBeta:
    """An α–β line: its fields are `alpha_seconds` and one `beta_seconds_per_…`."""

    __slots__ = ()
    alpha_seconds: float

    def __post_init__(self) -> None:
        alpha, beta = self.alpha_seconds, self.cost.beta_seconds
        if alpha < 0 or beta < 0 or alpha + beta == 0:
            raise InputError("alpha and beta must be at least 0, and one of them above 0")
        if (dtype := getattr(self, "dtype", None)) is not None:
            check_product_dtype(dtype)

    @property
    def cost(self) -> LinearCost:
        """The line over the unit of its β."""
        beta = getattr(self, _rate_of(self))
        return LinearCost(alpha_seconds=self.alpha_seconds, beta_seconds=beta)


def _rate_of(line: Any) -> str:  # noqa: ANN401 - a class that is an `_AlphaBeta`
    """Return the name of a line's β."""
    return next(item.name for item in fields(line) if item.name.startswith("beta_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmLine(_AlphaBeta):
    """α–β line of the GEMMs of one dtype."""

    dtype: str
    alpha_seconds: float
    beta_seconds_per_mac: float
    error: FitError | None = None

    @property
    def key(self) -> GemmKey:
        """The operation."""
        return GemmKey(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine(_AlphaBeta):
    """α–β line of one collective over one group size, per input byte of one rank."""

    op: CollectiveOp
    group_size: int
    alpha_seconds: float
    beta_seconds_per_byte: float
    in_flight: int = 1
    num_nodes: int = 0
    error: FitError | None = None

    def __post_init__(self) -> None:
        _AlphaBeta.__post_init__(self)
        check_positive(self, "group_size")
        if self.num_nodes < 0:
            raise InputError(f"num_nodes must be at least 0, got {self.num_nodes}")
        check_positive(self, "in_flight")

    @property
    def key(self) -> CollectiveKey:
        """The operation."""
        return CollectiveKey(self.op, self.group_size, self.num_nodes, self.in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLine(_AlphaBeta):
    """α–β line of one kind of copy between host and device."""

    direction: Direction
    pinned: bool
    alpha_seconds: float
    beta_seconds_per_byte: float
    both_ways: bool = False
    error: FitError | None = None

    @property
    def key(self) -> CopyKey:
        """The operation."""
        return CopyKey(self.direction, self.pinned, self.both_ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLine(_AlphaBeta):
    """α–β line of a memory-bound operation, by the names of `RowsPoint.op`."""

    op: str
    dtype: str
    alpha_seconds: float
    beta_seconds_per_element: float

    @property
    def error(self) -> None:
        """None: published lines have no error."""

    @property
    def key(self) -> RowsKey:
        """The operation."""
        return RowsKey(self.op, self.dtype)


OperationLine = GemmLine | CollectiveLine | CopyLine | RowsLine
_Line = TypeVar("_Line", GemmLine, CollectiveLine, CopyLine, RowsLine)


def changed_line(
    line: _Line, *, rate: Callable[[float], float], start: Callable[[float], float] = float
) -> _Line:
    """Return the line, and its error's intervals, with `start` of each α and `rate` of each β."""
    changes: dict[str, Any] = {
        "alpha_seconds": start(line.alpha_seconds), _rate_of(line): rate(line.cost.beta_seconds)
    }  # fmt: skip
    error: FitError | None = line.error
    if error is not None:
        (alpha_low, alpha_high), (beta_low, beta_high) = error.alpha_seconds, error.beta_seconds
        changes["error"] = replace(
            error, alpha_seconds=(start(alpha_low), start(alpha_high)),
            beta_seconds=(rate(beta_low), rate(beta_high)),
        )  # fmt: skip
    return replace(line, **changes)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One machine's costs and their provenance; it hashes by its digest.

    Args:
        steps: steps of layers, measured in addition to their operations.
        rows: memory-bound operations of published profiles; measured profiles have samples.
        tables: times that others measured or that a rule derives, where there are no samples.
        network: rule for groups of ranks without samples and tables; None for no such groups.
    """

    schema: int = PROFILE_SCHEMA
    name: str
    provenance: Provenance
    citation: str = ""
    machine: Machine
    gemm: tuple[GemmLine, ...] = ()
    collective: tuple[CollectiveLine, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    copy: tuple[CopyLine, ...] = ()
    rows: tuple[RowsLine, ...] = ()
    interference: Interference = field(default_factory=Interference)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    samples: tuple[Sample, ...] = ()
    tables: tuple[Table, ...] = field(default=(), metadata=UNLESS_DEFAULT)
    network: Network | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Hash of all fields except the name; a plan records the digest of its profile."""
        plain = encode(replace(self, name=""))
        for name in ("rows", "steps"):
            if not plain[name]:
                del plain[name]  # older plans record digests from before profiles had them
        return digest(plain)


def profile_from_document(document: object) -> Profile:
    """Return the profile in a file's plain values; raises InputError with the wrong key."""
    return decode_schema(
        Profile,
        without_unread_points(document),
        "profile",
        schemas=(PROFILE_SCHEMA,),
        hint="export it again with this version of moetune",
    )
