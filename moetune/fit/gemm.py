"""GEMMs of shapes that were not measured, from those that were.

A roofline over all shapes has start-up time, arithmetic and memory traffic; measured shapes near a
wanted one correct it (`Surface`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats
from moetune.domain.cost_keys import Shape
from moetune.fit.curve import (
    ASSUMED_RELATIVE_ERROR,
    Curve,
    curve_through,
    interpolation_errors,
    never_falling,
)
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


# The error of a shape that was not measured, when no second shape is there to check it:
# the largest 95th percentile of the gate's "usable".
_UNCHECKED_SHAPE_ERROR = 0.30


FADE = 0.5
"""Share of a shape's own ratio to others that is left an octave beyond its measured rows."""


MOST_LEFT_OUT = 32
"""Shapes of which errors are found by leaving them out; tables have hundreds."""
_AT_ONCE = 8
"""Blends in one array: one of all would be in memory that is not in any cache."""
_One = TypeVar("_One")


class Surface:
    """The measured GEMMs of one dtype and one form, over (num_experts, d_in, d_out) and rows.

    A measured shape has its own curve over rows. Any other shape takes the roofline fitted to
    all of them, times the mean ratio of the measured shapes to it at the same number of rows,
    weighted by nearness in log sizes. The rate never exceeds the best measured one.

    Args:
        shapes: times over rows of each measured shape; at least one.
        family: name of the shapes together, which share one systematic error.
        alpha_seconds: start-up time of the dtype's line.
        relative_error: typical error of a measured shape's curve; None to take it from them.
    """

    def __init__(
        self,
        *,
        shapes: Mapping[Shape, Series],
        family: str,
        alpha_seconds: float,
        relative_error: float | None = None,
    ) -> None:
        self._shapes = shapes
        self.family = family
        self.alpha_seconds = alpha_seconds
        self._relative_error = relative_error
        self._blends: dict[Shape, Curve] = {}
        self._completed: dict[Shape, Series] = {}
        self._rooflines: dict[bytes, Roofline] = {}

    @cached_property
    def relative_error(self) -> float:
        """The typical error of a measured shape between its measured rows."""
        if self._relative_error is not None:
            return self._relative_error
        errors = self.row_errors()
        return statistics.median(errors) if errors else ASSUMED_RELATIVE_ERROR

    @cached_property
    def shape_error(self) -> float:
        """The typical error of a shape that was not measured, by leaving each one out."""
        errors = self.shape_errors()
        typical = statistics.median(errors) if errors else _UNCHECKED_SHAPE_ERROR
        return max(self.relative_error, typical)

    def series(self, shape: Shape) -> Series | None:
        """Return the shape's times over rows; None where it was not measured."""
        return self._shapes.get(shape)

    def completed(self, shape: Shape) -> Series:
        """Return a known shape's times, and between and beyond them those at other shapes' rows.

        They are the blend of the others, times the shape's own ratio to it: straight in logarithms
        between its rows, and halfway back to 1 with each octave beyond them.
        """
        own = self._shapes[shape]
        if len(self._shapes) == 1:
            return own
        if shape not in self._completed:
            use = np.array([one != shape for one in self._shapes])
            blend = self._blend(shape, use, 0.0)
            rows, every = np.log2(own.sizes), np.log2(self._table.rows)
            [blended] = blend.seconds_at(np.array(own.sizes))
            beyond = np.maximum(np.maximum(rows[0] - every, every - rows[-1]), 0.0)
            ratios = np.interp(every, rows, np.log(own.medians / blended)) * FADE**beyond
            [seconds] = blend.seconds_at(self._table.rows) * np.exp(ratios)
            points = dict(zip(self._table.rows.tolist(), seconds.tolist(), strict=True))
            points.update(zip(own.sizes, own.medians, strict=True))
            sizes = tuple(sorted(points))
            self._completed[shape] = Series(
                sizes=sizes,
                times=tuple((points[size],) for size in sizes),
                medians=tuple(points[size] for size in sizes),
            )
        return self._completed[shape]

    def blend(self, shape: Shape) -> Curve:
        """Return the curve over rows of a shape that was not measured."""
        if shape not in self._blends:
            everyone = np.ones(len(self._shapes), bool)
            self._blends[shape] = self._blend(shape, everyone, self.shape_error)
        return self._blends[shape]

    def octaves_outside(self, shape: Shape) -> float:
        """Return how far the shape lies outside the box of the measured ones; 0 inside."""
        return sum(
            abs(math.log2(size / min(max(size, min(sizes)), max(sizes))))
            for size, sizes in zip(shape, zip(*self._shapes, strict=True), strict=True)
        )

    @property
    def rows_range(self) -> tuple[float, float]:
        """The fewest and the most measured rows of any shape."""
        sizes = [size for series in self._shapes.values() for size in series.sizes]
        return min(sizes), max(sizes)

    def row_errors(self) -> list[float]:
        """Return leave-one-out errors of the rows of some measured shapes, `MOST_LEFT_OUT`."""
        return [
            error
            for series in _some([*self._shapes.values()])
            for error in interpolation_errors(
                sizes=series.sizes, seconds=series.medians, alpha_seconds=self.alpha_seconds
            )
        ]

    def shape_errors(self) -> list[float]:
        """Return |predicted / measured − 1| of points when their shape is left out.

        Of `MOST_LEFT_OUT` shapes at most.
        """
        if len(self._shapes) == 1:
            return []
        errors = []
        rows = self._table.rows.tolist()
        others, everyone = ~np.eye(len(self._shapes), dtype=bool), np.ones(len(self._shapes), bool)
        left_out = _some([*zip(others, self._shapes.items(), strict=True)])
        uses = np.array([use for use, _ in left_out])
        self._fit(np.vstack([uses, everyone]))  # `blend` asks for that of all shapes next
        blends = []
        for first in range(0, len(left_out), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            seconds, _ = self._blended([shape for _, (shape, _) in left_out[some]], uses[some])
            blends.append(seconds)
        rising, _ = never_falling(np.vstack(blends))
        for (_, (_, series)), times in zip(left_out, rising.tolist(), strict=True):
            blend = dict(zip(rows, times, strict=True))
            errors += [
                abs(blend[size] / measured - 1)
                for size, measured in zip(series.sizes, series.medians, strict=True)
            ]
        return errors

    @cached_property
    def _table(self) -> Table:
        return table_of(self._shapes, self.alpha_seconds)

    def _blend(self, shape: Shape, use: Bools, relative_error: float) -> Curve:
        """Return the curve blended from the shapes in `use`.

        With more rows than any shape was measured with, it grows as the roofline does: the last
        time may be all start-up, which more rows do not repeat.
        """
        [seconds], [best_rate] = self._blended([shape], use[None])
        least, rows = math.prod(shape) / float(best_rate), self._table.rows[-1]
        modelled, twice = self._rooflines[use.tobytes()].seconds(shape, np.array([rows, 2 * rows]))
        growth = float((twice / modelled - 1) * seconds[-1] / rows)
        return curve_through(
            sizes=self._table.rows.tolist(),
            seconds=seconds.tolist(),
            alpha_seconds=self.alpha_seconds,
            relative_error=relative_error,
            least_seconds_per_size=least,
            growth_seconds=max(growth, least),
        )

    def _fit(self, uses: Bools) -> None:
        """Fit the rooflines of the shapes in each of `uses`, shape (rooflines, shapes)."""
        for use, roofline in zip(uses, rooflines_of(self._table, uses), strict=True):
            self._rooflines[use.tobytes()] = roofline

    def _blended(self, shapes: Sequence[Shape], uses: Bools) -> tuple[Floats, Floats]:
        """Return the times at the table's rows of some shapes, each blended from others.

        Args:
            uses: which shapes each is blended from, shape (blends, shapes).

        Returns:
            Shape (blends, rows); and the highest rate of those shapes, in MACs per second.
        """
        table, sizes = self._table, np.asarray(shapes, float)
        start, compute, traffic = np.array([self._roofline(use) for use in uses]).T[..., None]
        macs, elements = work_of(sizes, table.rows)
        modelled = (
            start[..., None] + compute[..., None] * table.macs + traffic[..., None] * table.elements
        )
        correction = np.log(table.seconds / modelled)
        octaves = (np.log2(table.shapes / sizes[:, None]) ** 2).sum(axis=2)
        with np.errstate(divide="ignore"):  # of a shape itself, which is left out
            near = 1 / np.square(octaves[..., None] + table.octaves_outside)
        weights = np.where(uses[..., None], near, 0.0)
        mean = (weights * correction).sum(axis=1) / weights.sum(axis=1)
        seconds = (start + compute * macs + traffic * elements) * np.exp(mean)
        best_rates = np.where(uses, table.best_rates, 0.0).max(axis=1)
        return np.maximum(seconds, macs / best_rates[:, None]), best_rates

    def _roofline(self, use: Bools) -> Roofline:
        if use.tobytes() not in self._rooflines:
            self._fit(use[None])
        return self._rooflines[use.tobytes()]


def _some(every: Sequence[_One]) -> Sequence[_One]:
    """Return `MOST_LEFT_OUT` of many, evenly spaced."""
    if len(every) <= MOST_LEFT_OUT:
        return every
    return [every[at * len(every) // MOST_LEFT_OUT] for at in range(MOST_LEFT_OUT)]
