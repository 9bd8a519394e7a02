"""Operations of a profile as curves over their size, and figures of them with their fits."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from moetune.domain.cluster import Machine, placement_name
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    unit_of,
)
from moetune.domain.costs import LinearCost
from moetune.domain.profile import FitError, GemmLine, Profile
from moetune.domain.samples import LAUNCHES
from moetune.domain.units import format_bytes, format_seconds
from moetune.fit.curve import Line as Fitted
from moetune.fit.index import Points as Measured
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.operations import Curves
from moetune.fit.pool import Series
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, drawn_seconds
from moetune.report.axes import Axis, log_seconds, log_sizes
from moetune.report.marks import SERIES, Band, Line, Mark, Panel, Points
from moetune.report.section import Figure, Value

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")
_BAND_PERCENT = (5.0, 95.0)
_PER_OCTAVE = 4
_LEAST_STEPS = 24
_UNMEASURED: Mapping[str, tuple[float, float]] = MappingProxyType({
    "bytes": (2.0**10, 2.0**28), "MACs": (2.0**20, 2.0**40), "elements": (2.0**10, 2.0**34),
    "chunks": (1.0, 64.0),
})  # fmt: skip
"""Range of sizes in which a line without measured sizes is drawn, by the line's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCurve:
    """One operation over its size.

    Args:
        name: unique in the profile, such as "all_to_all, 8 ranks, 4 in flight".
        kind: "collective", "GEMM", "copy", "memory-bound operation" or "attention".
        unit: of the size: "bytes", "rows", "elements", "chunks", "sequences" or "MACs".
        read: returns the measured points, or the line where nothing was measured; of a table's
            GEMM it completes the curve, which takes milliseconds.
        num_points: measured sizes.
        line: the α–β line over the same size, in seconds.
        error: of the line's fit; of a GEMM's shape, that of its dtype's line.
    """

    name: str
    kind: str
    unit: str
    read: Callable[[], Measured | Fitted | None]
    num_points: int = 0
    line: LinearCost | None
    error: FitError | None

    @property
    def key(self) -> str:
        """The name as letters, digits and hyphens, for addresses."""
        return _NOT_IN_KEYS.sub("-", self.name.lower()).strip("-")

    @property
    def is_shape(self) -> bool:
        """Whether this is one of the many shapes of a GEMM or of attention."""
        return self.kind == "attention" or (self.kind == "GEMM" and self.unit == "rows")

    @property
    def basis(self) -> Measured | Fitted:
        """The points or the line."""
        basis = self.read()
        assert basis is not None  # noqa: S101 - the index has what its keys name
        return basis


def operations_of(profile: Profile) -> tuple[OperationCurve, ...]:
    """Return all operations of the profile, collectives first."""
    index = index_of(profile)
    first: list[CostKey] = [*index.keys(CollectiveKey), *index.pool.of(GemmKey)]
    last: list[CostKey] = [*index.keys(CopyKey), *index.keys(RowsKey)]
    last += index.keys(AttentionKey)
    return (
        *(_curve(index, key) for key in first),
        *(gemm_line(line) for line in profile.gemm if index.gemm_line(line.dtype)),
        *(_curve(index, key) for key in last),
    )


def _curve(index: ProfileIndex, key: CostKey) -> OperationCurve:
    """Return an operation; the line of a GEMM's shape is its dtype's, over rows."""
    read: Callable[[], Measured | Fitted | None] = partial(index.basis, key)
    series, line = index.pool.series.get(key), index.lines.get(key)
    cost = line.cost if line else None
    if isinstance(key, GemmKey):
        read, line = partial(index.gemm_points, key), index.lines.get(GemmKey(key.dtype))
        scale = math.prod(key.shape)
        cost = replace(line.cost, beta_seconds=line.cost.beta_seconds * scale) if line else None
    name, kind, unit = _words(key, index.profile.machine)
    return OperationCurve(
        name=name, kind=kind, unit=unit, read=read, num_points=len(series.sizes) if series else 0,
        line=cost, error=line.error if line else None,
    )  # fmt: skip


def _words(key: CostKey, machine: Machine) -> tuple[str, str, str]:
    """Return an operation's name, its kind and the unit of its size."""
    match key:
        case CollectiveKey():
            flight = f", {key.in_flight} in flight" if key.in_flight > 1 else ""
            name = f"{key.op}, {placement_name(key.group, machine)}{flight}"
            return name, "collective", unit_of(key)
        case CopyKey():
            both = ", both ways" if key.both_ways else ""
            pinned = "pinned" if key.pinned else "pageable"
            return f"{key.direction} {pinned}{both}", "copy", unit_of(key)
        case RowsKey():
            unit = "chunks" if key.op in LAUNCHES else unit_of(key)
            return f"{key.op} {key.dtype}", "memory-bound operation", unit
        case AttentionKey():
            way = " backward" if key.backward else ""
            sizes = f"{key.length} long, {key.num_heads} × {key.head_dim}"
            return f"attention {key.dtype}{way}, {sizes}", "attention", unit_of(key)
        case GemmKey():
            shape = " × ".join(map(str, key.shape))
            by = f", by {key.kernel}" if key.kernel else ""
            return f"gemm {key.dtype} {key.product}, {shape}{by}", "GEMM", unit_of(key)


def gemm_line(line: GemmLine) -> OperationCurve:
    """Return a dtype's line over all its GEMMs, over multiply-accumulates."""
    name = f"gemm {line.dtype}"
    basis = Fitted(cost=line.cost, label=name)
    if line.error:
        basis = replace(basis, relative_error=line.error.median)
    return OperationCurve(
        name=name, kind="GEMM", unit="MACs", read=lambda: basis, line=line.cost, error=line.error
    )


def fit_figure(operation: OperationCurve) -> Figure:
    """Return raw times, medians, the curve between them, its 5–95 % band and the α–β line."""
    basis, sizes = operation.basis, tuple(_grid(operation))
    [seconds] = Curves().times(basis).seconds_at(np.array(sizes)).tolist()
    drawn = drawn_seconds(basis, sizes, num=NUM_RESAMPLES, seed=RESAMPLING_SEED)
    low, high = np.percentile(drawn, _BAND_PERCENT, axis=0).tolist()
    words = (
        f"{operation.name} has a line and no measured points: the band follows from assumed "
        "errors of its start-up time and its rate."
    )
    color = SERIES[0]
    marks: list[Mark] = [
        Band(x=sizes, low=tuple(low), high=tuple(high), name="5–95 %", color=f"{color}/0.16"),
        Line(x=sizes, y=tuple(seconds), name="predicted", color=color),
    ]
    curve = zip(sizes, seconds, low, high, strict=True)
    rows: list[tuple[Value, ...]] = [("predicted", *row) for row in curve]
    if isinstance(basis, Measured):
        words = (
            f"{operation.name} at {operation.num_points} sizes. The curve follows the medians and "
            "never falls; 90 % of draws from the measurement's noise and the fit's error lie in "
            "the band."
        )
        marks += _measured(operation, basis.series, sizes)
        rows = [*_measured_rows(basis.series), *rows]
    size = f"size_{operation.unit.lower()}"
    return Figure(
        name="fit",
        title=operation.name,
        words=words,
        panels=(Panel(x=_sizes_axis(operation), y=log_seconds("time of one"), marks=tuple(marks)),),
        header=("kind", size, "seconds", "p05_seconds", "p95_seconds"),
        rows=tuple(rows),
        is_wide=True,
    )


def _grid(operation: OperationCurve) -> list[float]:
    """Return sizes in even logarithmic steps, from half the smallest point to twice the largest."""
    basis, error = operation.basis, operation.error
    if isinstance(basis, Measured):
        low, high = basis.series.sizes[0] / 2, basis.series.sizes[-1] * 2
    elif error is not None:
        low, high = error.low, error.high
    else:
        low, high = _UNMEASURED[operation.unit]
    steps = max(_LEAST_STEPS, round(_PER_OCTAVE * math.log2(high / low)))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def _measured(
    operation: OperationCurve, series: Series, sizes: tuple[float, ...]
) -> Iterator[Mark]:
    """Yield what was measured: the α–β line, single times, and their medians on top."""
    if (line := operation.line) is not None:
        seconds = tuple(line.seconds(size) for size in sizes)
        yield Line(name="α–β line", x=sizes, y=seconds, color="muted", is_dotted=True, width=1.5)
    pairs = zip(series.sizes, series.times, strict=True)
    single = [(size, seconds) for size, times in pairs for seconds in times]
    yield Points(
        name="single blocks", color="second/0.35", size=4,
        x=tuple(size for size, _ in single), y=tuple(seconds for _, seconds in single),
    )  # fmt: skip
    yield Points(
        name="medians", color=SERIES[0], size=8, x=tuple(series.sizes), y=tuple(series.medians),
        hover=tuple(
            f"measured: {_size_text(size, operation.unit)}: {format_seconds(median)}"
            for size, median in zip(series.sizes, series.medians, strict=True)
        ),
    )  # fmt: skip


def _measured_rows(series: Series) -> list[tuple[Value, ...]]:
    rows: list[tuple[Value, ...]] = []
    for size, median, times in zip(series.sizes, series.medians, series.times, strict=True):
        rows.append(("median", size, median, None, None))
        rows += [("block", size, seconds, None, None) for seconds in times]
    return rows


def _size_text(size: float, unit: str) -> str:
    return format_bytes(round(size)) if unit == "bytes" else f"{size:,.0f} {unit}"


def _sizes_axis(operation: OperationCurve) -> Axis:
    titles = {
        "bytes": "input of one rank" if operation.kind == "collective" else "size",
        "rows": "rows of one expert",
        "MACs": "multiply-accumulates",
    }
    return log_sizes(titles.get(operation.unit, operation.unit), unit=operation.unit)
