"""Roofline of measured GEMMs: start-up time, arithmetic and memory traffic over all shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
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
_DEPENDS = 1e-24
"""Share of a column's squared length that is left of it beside those that it depends on."""
_SETS = np.array(
    [
        [column in one for column in range(3)]
        for size in range(4)
        for one in combinations(range(3), size)
    ]
)
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
    [seconds] = through.at(rows)
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
    points = np.stack([*work, seconds], axis=1) / seconds[:, None]
    triangles, largest = _triangles(points, uses[:, np.nonzero(table.measured)[0]])
    fits = _non_negative_least_squares(triangles / largest[:, None]) / largest[:, :3]
    return [Roofline(*fit) for fit in fits.tolist()]


def _triangles(points: Floats, uses: Bools) -> tuple[Floats, Floats]:
    """Return the triangle (R of QR) of the points of each fit, and each column's largest entry.

    Points that all fits have are reduced to a triangle first: one of a fit is that of theirs and
    the other points.

    Args:
        points: none negative, shape (points, columns).
        uses: shape (fits, points).

    Returns:
        Shapes (fits, columns, columns) and (fits, columns).
    """
    is_shared = uses.all(axis=0)
    shared, others = points[is_shared], points[~is_shared] * uses[:, ~is_shared, None]
    common = _triangle(shared)
    every = np.broadcast_to(common, (len(uses), *common.shape))
    largest = np.maximum(shared.max(axis=0, initial=0.0), others.max(axis=1, initial=0.0))
    return _triangle(np.concatenate([every, others], axis=1)), largest


def _triangle(points: Floats) -> Floats:
    return cast("Floats", np.linalg.qr(points, mode="r"))


def _non_negative_least_squares(triangles: Floats) -> Floats:
    """Return x ≥ 0 with features · x nearest to the target.

    It is the nearest of all sets of columns alone, which need not depend on each other: what such
    columns reach, fewer of them reach, too (Carathéodory).

    Args:
        triangles: of points with three features and the target, shape (n, up to 4, 4).

    Returns:
        Shape (n, 3).
    """
    # A fit of some columns of the features is one of the same columns of their triangle.
    features = triangles[:, None, :3, :3].swapaxes(2, 3) * _SETS[..., None]
    entries, missed = _least_squares(features, triangles[:, None, :3, 3])
    missed[(entries < 0).any(axis=2)] = np.inf
    is_nearest = missed <= missed.min(axis=1, keepdims=True) + _AS_NEAR
    found: Floats = entries[np.arange(len(entries)), is_nearest.argmax(axis=1)]
    return found


def _least_squares(columns: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Return x with Σ x_k · column_k nearest to the target, and the squared distance.

    By modified Gram-Schmidt; x is 0 for columns of zeros, and the distance infinite where one
    depends on the others.

    Args:
        columns: shape (..., 3, rows).
        target: shape (..., rows).

    Returns:
        Shapes (..., 3) and (...).
    """
    left, rest = list(np.moveaxis(columns, -2, 0)), target
    shares: dict[tuple[int, int], Floats] = {}
    along, depends = [], np.zeros(columns.shape[:-2], bool)
    for one in range(3):
        length = _dot(left[one], left[one])
        whole = _dot(columns[..., one, :], columns[..., one, :])
        is_new = length > _DEPENDS * whole
        depends |= (whole > 0) & ~is_new
        inverse = np.divide(1.0, length, out=np.zeros_like(length), where=is_new)
        for other in range(one + 1, 3):
            share = shares[one, other] = _dot(left[one], left[other]) * inverse
            left[other] = left[other] - share[..., None] * left[one]
        along.append(_dot(left[one], rest) * inverse)
        rest = rest - along[one][..., None] * left[one]
    last = along[2]
    middle = along[1] - shares[1, 2] * last
    first = along[0] - shares[0, 1] * middle - shares[0, 2] * last
    distance: Floats = np.where(depends, np.inf, _dot(rest, rest))
    return np.stack([first, middle, last], axis=-1), distance


def _dot(one: Floats, other: Floats) -> Floats:
    found: Floats = (one * other).sum(axis=-1)
    return found
