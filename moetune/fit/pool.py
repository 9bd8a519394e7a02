"""Points by operation: pooled raw samples, extended by tables. The first step of a fit.

Samples count within their range of sizes, tables outside it. An operation known only from a table
has the table's points. An operation known from both has the points of the samples, plus the table's
points below the smallest and above the largest sample.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    place_of,
)
from moetune.domain.reference import CollectiveTable, GemmTable, Label, Table
from moetune.domain.samples import InterferencePoint, ResourceClass, Sample, undisturbed

_NOWHERE = (math.inf, -math.inf)
Key = TypeVar("Key", GemmKey, CollectiveKey, CopyKey, RowsKey, AttentionKey)
_KINDS = (GemmKey, CollectiveKey, CopyKey, RowsKey, AttentionKey)
Overlapped = tuple[int, bool]
"""Bytes of each overlapping exchange, and whether it is alone on the link."""
InterferenceKey = tuple[ResourceClass, frozenset[ResourceClass]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One operation over its sizes.

    Args:
        sizes: distinct, positive and ascending; rows, bytes or elements.
        times: raw block times in seconds at each size, from the undisturbed visits.
    """

    sizes: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    medians: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The table behind an operation's times.

    Args:
        low, high: range of sizes in which samples of the machine count instead of the table.
    """

    label: Label
    source: str
    spread: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The label and the source."""
        return f"{self.label} ({self.source})"

    def covers(self, size: float) -> bool:
        """Return whether the time at that size is from the table."""
        return not self.low <= size <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All error-free measurements, by operation.

    Args:
        interference: raw times by victim and the others that run.
        overlapped: raw times of computation ("comp") by the exchanges that overlap it, and of
            exchanges ("comm") that overlap computation.
        origins: table of each operation that has points from tables.
    """

    series: Mapping[CostKey, Series]
    interference: Mapping[InterferenceKey, tuple[float, ...]]
    overlapped: Mapping[ResourceClass, Mapping[Overlapped, tuple[float, ...]]]
    origins: Mapping[CostKey, Origin] = field(default_factory=dict)

    def of(self, kind: type[Key]) -> dict[Key, Series]:
        """Return the operations of a kind."""
        return {key: series for key, series in self.series.items() if isinstance(key, kind)}


def pool(samples: Iterable[Sample]) -> Pool:
    """Return undisturbed samples by operation, without failed samples and sizes of zero."""
    timed = [sample for sample in samples if sample.seconds and not sample.error]
    interference, overlapped = _interference(timed)
    visits: defaultdict[CostKey, defaultdict[int, list[Sample]]]
    visits = defaultdict(lambda: defaultdict(list))
    for sample in timed:
        place = place_of(sample.point)
        if place is not None and place[1] > 0:
            visits[place[0]][place[1]].append(sample)
    return Pool(
        series=in_order({key: _series(of_key) for key, of_key in visits.items()}),
        interference=interference,
        overlapped=overlapped,
    )


def in_order(series: Mapping[CostKey, Series]) -> dict[CostKey, Series]:
    """Return the operations in sorted order, one kind after the other."""
    return {
        key: series[key]
        for kind in _KINDS
        for key in sorted(key for key in series if isinstance(key, kind))
    }


def _series(visits_of: Mapping[int, Sequence[Sample]]) -> Series:
    points = sorted((float(size), _times(visits)) for size, visits in visits_of.items())
    return Series(
        sizes=tuple(size for size, _ in points),
        times=tuple(times for _, times in points),
        medians=tuple(statistics.median(times) for _, times in points),
    )


def _times(visits: Sequence[Sample]) -> tuple[float, ...]:
    """Return the raw times of the least disturbed visits."""
    return tuple(chain.from_iterable(visit.seconds for visit in undisturbed(visits)))


def _interference(
    samples: Iterable[Sample],
) -> tuple[
    Mapping[InterferenceKey, tuple[float, ...]],
    Mapping[ResourceClass, Mapping[Overlapped, tuple[float, ...]]],
]:
    """Return times by victim and others, and times of overlapped classes by exchange."""
    table: defaultdict[InterferenceKey, list[Sample]] = defaultdict(list)
    overlapped: dict[ResourceClass, defaultdict[Overlapped, list[Sample]]] = {
        victim: defaultdict(list) for victim in ("comp", "comm")
    }
    for sample in samples:
        match sample.point:
            case (
                InterferencePoint(victim="comp" as victim, others=("comm",), comm_bytes=size)
                | InterferencePoint(victim="comm" as victim, others=("comp",), comm_bytes=size)
            ) if size:
                overlapped[victim][size, sample.point.is_alone].append(sample)
            case InterferencePoint(comm_bytes=0) | InterferencePoint(others=()) as point:
                rivals = frozenset(point.others) - {point.victim}
                table[point.victim, rivals].append(sample)
            case _:
                pass  # has a size, but other classes overlap too
    return {key: _times(visits) for key, visits in table.items()}, {
        victim: {exchange: _times(visits) for exchange, visits in of_victim.items()}
        for victim, of_victim in overlapped.items()
    }


def with_tables(measured: Pool, tables: Iterable[Table]) -> Pool:
    """Return the pool extended by tables; the first table of an operation takes precedence."""
    joined = dict(measured.series)
    origins: dict[CostKey, Origin] = {}
    for table in tables:
        for key, series in _series_by_key(table).items():
            if key not in origins:
                samples = measured.series.get(key)
                low, high = (samples.sizes[0], samples.sizes[-1]) if samples else _NOWHERE
                origins[key] = Origin(
                    label=table.label, source=table.source, spread=table.spread, low=low, high=high
                )
                joined[key] = _join_series(samples, series)
    return replace(measured, series=in_order(joined), origins=origins)


def _series_by_key(table: Table) -> Mapping[CostKey, Series]:
    """Return the series of a table's operations; none for a dispatcher's, which is only shown."""
    if isinstance(table, GemmTable):
        return dict(gemm_series(table).items())
    if isinstance(table, CollectiveTable):
        key = CollectiveKey(table.op, table.group_size, table.num_nodes)
        return {key: series_of(table.points)}
    return {}


def gemm_series(table: GemmTable) -> dict[GemmKey, Series]:
    """Return the table's times over rows, by shape."""
    rows: defaultdict[tuple[float, float], list[tuple[float, float]]] = defaultdict(list)
    for size, d_in, d_out, seconds in table.points:
        rows[d_in, d_out].append((size, seconds))
    return {
        GemmKey(table.dtype, table.product, table.num_experts, int(d_in), int(d_out)): series_of(
            points
        )
        for (d_in, d_out), points in rows.items()
    }


def series_of(points: Iterable[tuple[float, ...]]) -> Series:
    """Return rows of (size, seconds) as a series; the first row counts if sizes are equal."""
    times: dict[float, float] = {}
    for size, seconds in points:
        times.setdefault(size, seconds)
    rising = sorted(times.items())
    medians = tuple([seconds for _, seconds in rising])
    return Series(
        sizes=tuple([float(size) for size, _ in rising]),
        times=tuple([(median,) for median in medians]),
        medians=medians,
    )


def _join_series(measured: Series | None, table: Series) -> Series:
    """Return the measured points, plus the table's points outside their range of sizes."""
    if measured is None:
        return table
    low, high = measured.sizes[0], measured.sizes[-1]
    points = [
        *zip(measured.sizes, measured.times, measured.medians, strict=True),
        *(
            point
            for point in zip(table.sizes, table.times, table.medians, strict=True)
            if not low <= point[0] <= high
        ),
    ]
    sizes, times, medians = zip(*sorted(points), strict=True)
    return Series(sizes=sizes, times=times, medians=medians)


def resampled_medians(
    *, times: Sequence[Sequence[float]], num: int, rng: "np.random.Generator"
) -> Floats:
    """Return bootstrap medians of each point's raw times, shape (num, points)."""
    columns = []
    for point in times:
        raw = np.asarray(point, float)
        drawn = np.sort(raw[rng.integers(0, raw.size, (num, raw.size))], axis=1)
        columns.append((drawn[:, (raw.size - 1) // 2] + drawn[:, raw.size // 2]) / 2)
    return np.stack(columns, axis=1)
