"""Raw samples pooled by point, and points by operation: the first step of a fit."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    place_of,
)
from moetune.domain.samples import InterferencePoint, ResourceClass, Sample, undisturbed

Key = TypeVar("Key", GemmKey, CollectiveKey, CopyKey, RowsKey, AttentionKey)
_KINDS = (GemmKey, CollectiveKey, CopyKey, RowsKey, AttentionKey)
Overlapped = tuple[int, bool]
"""Bytes of each exchange that overlaps others, and whether it is alone on the link."""
InterferenceKey = tuple[ResourceClass, frozenset[ResourceClass]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One operation over its sizes.

    Args:
        sizes: distinct, positive and ascending; rows, bytes or elements.
        times: raw block times in seconds at each size, of the undisturbed visits.
        medians: their medians.
    """

    sizes: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    medians: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All that was measured without an error, by operation.

    Args:
        series: by operation, over its size.
        interference: raw times by victim and the others that run.
        overlapped_comp: raw times of computation, by the exchanges that overlap it.
        overlapped_comm: raw times of exchanges that overlap computation.
    """

    series: Mapping[CostKey, Series]
    interference: Mapping[InterferenceKey, tuple[float, ...]]
    overlapped_comp: Mapping[Overlapped, tuple[float, ...]]
    overlapped_comm: Mapping[Overlapped, tuple[float, ...]]

    def of(self, kind: type[Key]) -> dict[Key, Series]:
        """Return the operations of a kind."""
        return {key: series for key, series in self.series.items() if isinstance(key, kind)}


def pool(samples: Iterable[Sample]) -> Pool:
    """Return the samples by operation; the undisturbed visits of a point are joined.

    Samples with an error, and sizes of zero, are omitted.
    """
    timed = [sample for sample in samples if sample.seconds and not sample.error]
    interference, overlapped_comp, overlapped_comm = _interference(timed)
    visits: defaultdict[CostKey, defaultdict[int, list[Sample]]]
    visits = defaultdict(lambda: defaultdict(list))
    for sample in timed:
        place = place_of(sample.point)
        if place is not None and place[1] > 0:
            visits[place[0]][place[1]].append(sample)
    return Pool(
        series=in_order({key: _series(of_key) for key, of_key in visits.items()}),
        interference=interference,
        overlapped_comp=overlapped_comp,
        overlapped_comm=overlapped_comm,
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
    """Return the raw times of the visits that were disturbed least."""
    return tuple(chain.from_iterable(visit.seconds for visit in undisturbed(visits)))


_Times = Mapping[Overlapped, tuple[float, ...]]


def _interference(
    samples: Iterable[Sample],
) -> tuple[Mapping[InterferenceKey, tuple[float, ...]], _Times, _Times]:
    """Return the table's times; by size, those of computation and exchanges that overlap."""
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
            case InterferencePoint(comm_bytes=0) | InterferencePoint(others=()) as at:
                table[at.victim, frozenset(at.others) - {at.victim}].append(sample)
            case _:
                pass  # sized, but more than computation and exchanges overlap
    comp, comm = (
        {one: _times(visits) for one, visits in overlapped[victim].items()}
        for victim in ("comp", "comm")
    )
    return {key: _times(visits) for key, visits in table.items()}, comp, comm
