"""Roofline of measured GEMMs: start-up time, arithmetic and memory traffic over all shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats
from moetune.domain.cost_keys import Shape
from moetune.fit.curve import curve_through
from moetune.fit.pool import Series

Bools = NDArray[np.bool_]

_AS_NEAR = 1e-12
"""Squared relative errors that rounding alone makes differ: of such fits the first, simplest one is
taken, so that processors which round in other ways predict alike."""
_DEPENDS = 1e-12
"""Share of its largest singular value below which a set's columns depend on each other."""
_SETS = tuple(chain.from_iterable(combinations(range(3), size) for size in range(1, 4)))
"""Sets of the columns of a roofline, the simplest first."""


class Roofline(NamedTuple):
    """Seconds of a GEMM: those of its start, of each MAC, and of each element moved."""

    start: float
    compute: float
    traffic: float

    def seconds(self, shape: Shape, rows: Floats) -> Floats:
        """Return the time of a shape at each number of rows."""
        macs, elements = work_of(np.asarray([shape], float), rows)
        found: Floats = (self.start + self.compute * macs + self.traffic * elements)[0]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The measured shapes by all rows at which any of them was measured.

    Args:
        rows: shape (rows,).
        shapes: shape (shapes, 3).
        seconds, macs, elements: shape (shapes, rows); of each shape's curve.
        measured: where a time is a measured one, shape (shapes, rows).
        octaves_outside: squared distance from the shape's measured rows, shape (shapes, rows).
        best_rates: highest MACs per second at measured rows, shape (shapes,).
    """

    rows: Floats
    shapes: Floats
    seconds: Floats
    macs: Floats
    elements: Floats
    measured: Bools
    octaves_outside: Floats
    best_rates: Floats


def _seconds_at(rows: Floats, curve: Series, alpha_seconds: float) -> Floats:
    through = curve_through(sizes=curve.sizes, seconds=curve.medians, alpha_seconds=alpha_seconds)
    [seconds] = through.seconds_at(rows)
    return cast("Floats", seconds)


def table_of(shapes: Mapping[Shape, Series], alpha_seconds: float) -> Table:
    """Return the table of the measured shapes.

    Args:
        alpha_seconds: start-up time of their line.
    """
    rows = np.array(sorted({size for series in shapes.values() for size in series.sizes}))
    curves = [*shapes.values()]
    seconds = np.array([_seconds_at(rows, one, alpha_seconds) for one in curves])
    sizes = np.array(list(shapes), float)
    macs, elements = work_of(sizes, rows)
    measured = np.zeros(seconds.shape, bool)
    numbers = np.repeat(range(len(curves)), [len(one.sizes) for one in curves])
    measured[numbers, np.searchsorted(rows, [size for one in curves for size in one.sizes])] = True
    low = np.array([[curve.sizes[0]] for curve in curves])
    high = np.array([[curve.sizes[-1]] for curve in curves])
    return Table(
        rows=rows,
        shapes=sizes,
        seconds=seconds,
        macs=macs,
        elements=elements,
        measured=measured,
        octaves_outside=np.log2(rows / np.clip(rows, low, high)) ** 2,
        best_rates=np.where(measured, macs / seconds, 0.0).max(axis=1),
    )


def work_of(shapes: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Return MACs, and elements read and written, by shape and rows."""
    num_experts, d_in, d_out = shapes.T[:, :, None]
    return (
        num_experts * rows * d_in * d_out,
        num_experts * (rows * (d_in + d_out) + d_in * d_out),
    )


def rooflines_of(table: Table, uses: Bools) -> list[Roofline]:
    """Return start, compute and traffic, none negative, with the least relative error.

    seconds = start + MACs · compute + elements moved · traffic

    Args:
        uses: which shapes each roofline is fitted to, shape (rooflines, shapes).
    """
    seconds = table.seconds[table.measured]
    work = [np.ones_like(seconds), table.macs[table.measured], table.elements[table.measured]]
    features, shapes = np.stack(work, axis=1) / seconds[:, None], np.nonzero(table.measured)[0]
    return [Roofline(*_non_negative_fit(features[use[shapes]])) for use in uses]


def _non_negative_fit(features: Floats) -> list[float]:
    """Return x ≥ 0 with features · x nearest to 1.

    It is the nearest of all sets of columns alone, which need not depend on each other: what such
    columns reach, fewer of them reach, too (Carathéodory). A fit of some columns is one of the same
    columns of the triangle (R of QR) of all of them.

    Args:
        features: none negative, shape (points, 3).
    """
    largest = features.max(axis=0)
    targets = np.ones((len(features), 1))
    points = np.hstack([features / largest, targets])
    triangle = cast("Floats", np.linalg.qr(points, mode="r"))
    fits: list[tuple[float, Floats]] = []
    for columns in _SETS:
        fit, _, rank, _ = np.linalg.lstsq(
            triangle[:, list(columns)], triangle[:, 3], rcond=_DEPENDS
        )
        if rank == len(columns) and (fit >= 0).all():
            entries = np.zeros(3)
            entries[list(columns)] = fit
            missed = triangle[:, :3] @ entries - triangle[:, 3]
            fits.append((float(missed @ missed), entries))
    nearest = min(distance for distance, _ in fits) + _AS_NEAR
    found = next(entries for distance, entries in fits if distance <= nearest)
    return cast("list[float]", (found / largest).tolist())
