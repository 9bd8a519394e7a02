"""Tables of a profile beside its samples: samples count where they cover, tables for the rest.

An operation that only a table knows has the table's points. One that both know has the samples'
points, and the table's below the smallest and above the largest of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from moetune.domain.reference import CollectiveTable, GemmTable, Label, Table
from moetune.fit.pool import CollectiveKey, GemmKey, Pool, Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The table behind an operation's times.

    Args:
        low, high: sizes between which the times are the machine's own, as samples have them.
    """

    label: Label
    source: str
    spread: float
    low: float = math.inf
    high: float = -math.inf

    @property
    def words(self) -> str:
        """The label and the source."""
        return f"{self.label} ({self.source})"

    @property
    def has_samples(self) -> bool:
        """Whether some of the times are the machine's own."""
        return self.low <= self.high

    def covers(self, size: float) -> bool:
        """Return whether the time at that size is from the table."""
        return not self.low <= size <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A pool with the tables' points, and the origin of each operation that has some."""

    pool: Pool
    gemm: Mapping[GemmKey, Origin]
    collective: Mapping[CollectiveKey, Origin]


def with_tables(measured: Pool, tables: Iterable[Table]) -> Tables:
    """Return the samples' pool with the points of the tables.

    Of several tables of one operation, or one shape of a GEMM, the first one counts.
    """
    gemm, collective = dict(measured.gemm), dict(measured.collective)
    gemm_origins: dict[GemmKey, Origin] = {}
    origins: dict[CollectiveKey, Origin] = {}
    for table in tables:
        if isinstance(table, GemmTable):
            alone = _origin(table, None)
            for gemm_key, series in gemm_series(table).items():
                if gemm_key not in gemm_origins:
                    known = gemm.get(gemm_key)
                    gemm_origins[gemm_key] = _origin(table, known) if known else alone
                    gemm[gemm_key] = _joined(gemm.get(gemm_key), series)
        elif isinstance(table, CollectiveTable):
            key = (table.op, table.group_size, table.num_nodes, 1)
            if key not in origins:
                origins[key] = _origin(table, collective.get(key))
                collective[key] = _joined(collective.get(key), series_of(table.points))
    joined = replace(
        measured,
        gemm={key: gemm[key] for key in sorted(gemm)},
        collective={key: collective[key] for key in sorted(collective)},
    )
    return Tables(pool=joined, gemm=gemm_origins, collective=origins)


def gemm_series(table: GemmTable) -> dict[GemmKey, Series]:
    """Return the table's times over rows, by shape."""
    rows: defaultdict[tuple[float, float], list[tuple[float, float]]] = defaultdict(list)
    for size, d_in, d_out, seconds in table.points:
        rows[d_in, d_out].append((size, seconds))
    return {
        (table.dtype, table.product, (table.num_experts, int(d_in), int(d_out))): series_of(points)
        for (d_in, d_out), points in rows.items()
    }


def series_of(points: Iterable[tuple[float, ...]]) -> Series:
    """Return rows of (size, seconds) as a series; of equal sizes the first one counts."""
    times: dict[float, float] = {}
    for size, seconds in points:
        times.setdefault(size, seconds)
    rising = sorted(times.items())
    medians = tuple([seconds for _, seconds in rising])
    return Series(
        sizes=tuple([float(size) for size, _ in rising]),
        times=tuple([(one,) for one in medians]),
        medians=medians,
    )


def _origin(table: Table, measured: Series | None) -> Origin:
    found = Origin(label=table.label, source=table.source, spread=table.spread)
    if measured is None:
        return found
    return replace(found, low=measured.sizes[0], high=measured.sizes[-1])


def _joined(measured: Series | None, table: Series) -> Series:
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
