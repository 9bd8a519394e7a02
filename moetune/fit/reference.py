"""Tables of a profile beside its samples: samples count where they cover, tables for the rest.

An operation that only a table knows has the table's points. One that both know has the samples'
points, and the table's below the smallest and above the largest of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from moetune.domain.cost_keys import CollectiveKey, CostKey, GemmKey
from moetune.domain.reference import CollectiveTable, GemmTable, Label, Table
from moetune.fit.pool import Pool, Series, in_order


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
    origins: Mapping[CostKey, Origin]


def with_tables(measured: Pool, tables: Iterable[Table]) -> Tables:
    """Return the samples' pool with the points of the tables.

    Of several tables of one operation, or one shape of a GEMM, the first one counts.
    """
    joined = dict(measured.series)
    origins: dict[CostKey, Origin] = {}
    for table in tables:
        for key, series in _series_by_key(table).items():
            if key not in origins:
                origins[key] = _origin(table, measured.series.get(key))
                joined[key] = _joined(measured.series.get(key), series)
    return Tables(pool=replace(measured, series=in_order(joined)), origins=origins)


def _series_by_key(table: Table) -> Mapping[CostKey, Series]:
    """Return the times of a table's operations; none of a dispatcher's, which only is shown."""
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
