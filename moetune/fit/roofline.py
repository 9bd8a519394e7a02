"""Roofline of measured GEMMs: start-up time, arithmetic and memory traffic over all shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moetune.fit.curve import curve_through
from moetune.fit.line import Floats
from moetune.fit.pool import Series, Shape

Bools = NDArray[np.bool_]
_Fits = dict[tuple[int, ...], tuple[NDArray[np.floating], float]]
"""Least squares and what they miss by, squared, by the columns that they have."""

_AS_NEAR = 1e-12
"""Squared relative errors that rounding alone makes differ: of such fits the first, simplest one is
taken, so that processors which round in other ways predict alike."""
_CLEARLY = 1e-9
"""Squared relative errors above which no rounding makes a fit the nearer one."""


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


def table_of(shapes: Mapping[Shape, Series], alpha_seconds: float) -> Table:
    """Return the table of the measured shapes.

    Args:
        alpha_seconds: start-up time of their line.
    """
    rows = np.array(sorted({size for series in shapes.values() for size in series.sizes}))
    curves = [
        curve_through(sizes=one.sizes, seconds=one.medians, alpha_seconds=alpha_seconds)
        for one in shapes.values()
    ]
    seconds = np.array([[curve.predict(size).seconds for size in rows] for curve in curves])
    sizes = np.array(list(shapes), float)
    macs, elements = work_of(sizes, rows)
    measured = np.array([np.isin(rows, curve.sizes) for curve in curves])
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


def roofline_of(table: Table, use: Bools) -> tuple[float, float, float]:
    """Return start, compute and traffic, none negative, with the least relative error.

    seconds = start + MACs · compute + elements moved · traffic
    """
    where = table.measured & use[:, None]
    seconds = table.seconds[where]
    work = [np.ones_like(seconds), table.macs[where], table.elements[where]]
    features = np.stack(work, axis=1) / seconds[:, None]
    scale = features.max(axis=0)
    start, compute, traffic = _non_negative_least_squares(features / scale) / scale
    return float(start), float(compute), float(traffic)


def _non_negative_least_squares(features: Floats) -> Floats:
    """Return x ≥ 0 with features · x nearest to 1, of the sets of non-zero entries."""
    count = features.shape[1]
    best, least = np.zeros(count), math.inf
    fits = _least_squares(features)
    for columns in sorted(fits, key=lambda one: (len(one), one)):
        found, missed = fits[columns]
        if (found >= 0).all() and missed < least - _AS_NEAR:
            best, least = np.zeros(count), missed
            best[list(columns)] = found
    return best


def _least_squares(features: Floats) -> _Fits:
    """Return least squares by the columns that they have, and the squares that they miss by.

    Some of the columns of a fit miss more than all of them: where all entries are positive, by at
    least the square of the smallest entry times the smallest singular value. Where this bound says
    that a non-negative fit misses less, columns are left out.
    """
    count, wanted = features.shape[1], np.ones(len(features))
    fits: _Fits = {}
    least, bounds = math.inf, list[tuple[set[int], float]]()
    for size in range(count, 0, -1):
        for columns in combinations(range(count), size):
            limit = least + _CLEARLY
            if any(bound > limit and within.issuperset(columns) for within, bound in bounds):
                continue
            part = features[:, list(columns)]
            found, _, rank, singular = np.linalg.lstsq(part, wanted)
            missed, smallest = float(np.sum((part @ found - 1) ** 2)), float(found.min())
            fits[columns] = found, missed
            least = min(least, missed) if smallest >= 0 else least
            more = (max(smallest, 0.0) * singular[-1]) ** 2 if rank == size else 0.0
            bounds.append((set(columns), missed + more))
    return fits
