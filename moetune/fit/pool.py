"""Samples of the same point pooled, and points of the same operation put in a row."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from moetune.domain.samples import (
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Product,
    ResourceClass,
    RowsPoint,
    Sample,
)

Shape = tuple[int, int, int]
GemmKey = tuple[str, Product, Shape]
Group = tuple[int, int]
"""Ranks, and the nodes they are spread over; 0 for consecutive ranks."""
CollectiveKey = tuple[CollectiveOp, int, int, int]
CopyKey = tuple[Direction, bool, bool]
RowsKey = tuple[str, str]
Key = TypeVar("Key", GemmKey, CollectiveKey, CopyKey, RowsKey)
InterferenceKey = tuple[ResourceClass, frozenset[ResourceClass]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One operation over its sizes.

    Args:
        sizes: distinct, positive and ascending; rows, bytes or elements.
        times: raw block times in seconds at each size.
        medians: their medians.
    """

    sizes: tuple[float, ...]
    times: tuple[tuple[float, ...], ...]
    medians: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All that was measured without an error, by operation.

    Args:
        gemm: by dtype, product and (num_experts, d_in, d_out), over rows of one expert.
        collective: by op, group size, nodes and number in flight, over bytes.
        copy: by direction, pinned and both_ways, over bytes.
        rows: by op and dtype, over elements.
        interference: raw times by victim and the others that run.
        comp_beside: raw times of computation, by the bytes of the exchanges beside it.
        comm_beside: raw times of exchanges beside computation, by their bytes.
    """

    gemm: Mapping[GemmKey, Series]
    collective: Mapping[CollectiveKey, Series]
    copy: Mapping[CopyKey, Series]
    rows: Mapping[RowsKey, Series]
    interference: Mapping[InterferenceKey, tuple[float, ...]]
    comp_beside: Mapping[int, tuple[float, ...]]
    comm_beside: Mapping[int, tuple[float, ...]]


_Bucket = defaultdict[float, list[float]]


def pool(samples: Iterable[Sample]) -> Pool:
    """Return the samples by operation; raw times of the same point are joined.

    A sample with an error has no time to give and is left out, and so is a size of zero.
    """
    gemm: defaultdict[GemmKey, _Bucket] = defaultdict(_bucket)
    collective: defaultdict[CollectiveKey, _Bucket] = defaultdict(_bucket)
    copy: defaultdict[CopyKey, _Bucket] = defaultdict(_bucket)
    rows: defaultdict[RowsKey, _Bucket] = defaultdict(_bucket)
    interference: defaultdict[InterferenceKey, list[float]] = defaultdict(list)
    beside: dict[ResourceClass, defaultdict[int, list[float]]] = {
        victim: defaultdict(list) for victim in ("comp", "comm")
    }
    for sample in samples:
        times = sample.seconds
        if sample.error or not times:
            continue
        match sample.point:
            case GemmPoint() as at:
                shape = (at.num_experts, at.d_in, at.d_out)
                gemm[at.dtype, at.product, shape][at.rows].extend(times)
            case CollectivePoint() as at:
                group = (at.op, at.group_size, at.num_nodes, at.in_flight)
                collective[group][at.num_bytes].extend(times)
            case CopyPoint() as at:
                copy[at.direction, at.pinned, at.both_ways][at.num_bytes].extend(times)
            case RowsPoint() as at:
                rows[at.op, at.dtype][at.elements].extend(times)
            case (
                InterferencePoint(victim="comp" as victim, others=("comm",), comm_bytes=size)
                | InterferencePoint(victim="comm" as victim, others=("comp",), comm_bytes=size)
            ) if size:
                beside[victim][size].extend(times)
            case InterferencePoint(comm_bytes=0) | InterferencePoint(others=()) as at:
                interference[at.victim, frozenset(at.others) - {at.victim}].extend(times)
            case InterferencePoint():
                pass  # of a size, but not of computation and exchanges alone
    return Pool(
        gemm=_all_series(gemm),
        collective=_all_series(collective),
        copy=_all_series(copy),
        rows=_all_series(rows),
        interference={key: tuple(times) for key, times in interference.items()},
        comp_beside={size: tuple(times) for size, times in beside["comp"].items()},
        comm_beside={size: tuple(times) for size, times in beside["comm"].items()},
    )


def _bucket() -> _Bucket:
    return defaultdict(list)


def _all_series(buckets: Mapping[Key, _Bucket]) -> dict[Key, Series]:
    """Return the operations in sorted order, so that a seed means the same in every run."""
    made = {key: _series(buckets[key]) for key in sorted(buckets)}
    return {key: series for key, series in made.items() if series.sizes}


def _series(bucket: _Bucket) -> Series:
    points = sorted((float(size), tuple(times)) for size, times in bucket.items() if size > 0)
    return Series(
        sizes=tuple(size for size, _ in points),
        times=tuple(times for _, times in points),
        medians=tuple(statistics.median(times) for _, times in points),
    )
