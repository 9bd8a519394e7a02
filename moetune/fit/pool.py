"""Raw samples pooled by point, and points by operation: the first step of a fit."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from moetune.domain.gemm_forms import GemmForm
from moetune.domain.samples import (
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
    Sample,
    undisturbed,
)

Shape = tuple[int, int, int]
GemmKey = tuple[str, GemmForm, Shape]
CollectiveKey = tuple[CollectiveOp, int, int, int]
CopyKey = tuple[Direction, bool, bool]
RowsKey = tuple[str, str]
AttentionKey = tuple[str, int, int, int, bool]
"""Dtype, length, heads, width of a head, and whether backward."""
Key = TypeVar("Key", GemmKey, CollectiveKey, CopyKey, RowsKey, AttentionKey)
OnePoint = TypeVar("OnePoint", bound=Point)
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
        gemm: by dtype, form and (num_experts, d_in, d_out), over rows of one expert.
        collective: by op, group size, nodes and number in flight, over bytes.
        copy: by direction, pinned and both_ways, over bytes.
        rows: by op and dtype, over elements.
        attention: by dtype, length, heads, width of a head and direction, over sequences.
        interference: raw times by victim and the others that run.
        overlapped_comp: raw times of computation, by the exchanges that overlap it.
        overlapped_comm: raw times of exchanges that overlap computation.
    """

    gemm: Mapping[GemmKey, Series]
    collective: Mapping[CollectiveKey, Series]
    copy: Mapping[CopyKey, Series]
    rows: Mapping[RowsKey, Series]
    attention: Mapping[AttentionKey, Series]
    interference: Mapping[InterferenceKey, tuple[float, ...]]
    overlapped_comp: Mapping[Overlapped, tuple[float, ...]]
    overlapped_comm: Mapping[Overlapped, tuple[float, ...]]


def pool(samples: Iterable[Sample]) -> Pool:
    """Return the samples by operation; the undisturbed visits of a point are joined.

    Samples with an error, and sizes of zero, are omitted.
    """
    timed = [sample for sample in samples if sample.seconds and not sample.error]
    interference, overlapped_comp, overlapped_comm = _interference(timed)
    return Pool(
        gemm=_curves(
            timed,
            GemmPoint,
            lambda at: ((at.dtype, at.product, (at.num_experts, at.d_in, at.d_out)), at.rows),
        ),
        collective=_curves(
            timed,
            CollectivePoint,
            lambda at: ((at.op, at.group_size, at.num_nodes, at.in_flight), at.num_bytes),
        ),
        copy=_curves(
            timed,
            CopyPoint,
            lambda at: ((at.direction, at.pinned, at.both_ways), at.num_bytes),
        ),
        rows=_curves(timed, RowsPoint, lambda at: ((at.op, at.dtype), at.elements)),
        attention=_curves(
            timed,
            AttentionPoint,
            lambda at: (
                (at.dtype, at.length, at.num_heads, at.head_dim, at.backward),
                at.num_sequences,
            ),
        ),
        interference=interference,
        overlapped_comp=overlapped_comp,
        overlapped_comm=overlapped_comm,
    )


def _curves(
    samples: Iterable[Sample], kind: type[OnePoint], place: Callable[[OnePoint], tuple[Key, int]]
) -> dict[Key, Series]:
    """Return the operations in sorted order, so that a seed means the same in every run.

    Args:
        place: a point's operation and size.
    """
    found: defaultdict[Key, defaultdict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if isinstance(sample.point, kind):
            key, size = place(sample.point)
            found[key][size].append(sample)
    made = {key: _series(found[key]) for key in sorted(found)}
    return {key: series for key, series in made.items() if series.sizes}


def _series(visits_of: Mapping[int, Sequence[Sample]]) -> Series:
    points = sorted((float(size), _times(visits)) for size, visits in visits_of.items() if size > 0)
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
