"""GEMMs of shapes that were not measured, predicted from measured shapes.

A roofline over all shapes has start-up time, arithmetic and memory traffic. Measured shapes near
the wanted shape correct it (`Surface`).
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
from moetune.domain.once import Tables, once
from moetune.fit.curve import (
    ASSUMED_RELATIVE_ERROR,
    Curve,
    curve_through,
    interpolation_errors,
    never_falling,
)
from moetune.fit.pool import Series, series_of

Bools = NDArray[np.bool_]

_AS_NEAR = 1e-12
"""Difference of squared relative errors that may be rounding. Among fits this close the first,
simplest fit wins, so that processors with different rounding predict the same."""
_DEPENDS = 1e-12
"""Share of the largest singular value below which a set's columns count as dependent."""
_SETS = tuple(chain.from_iterable(combinations(range(3), size) for size in range(1, 4)))
"""Sets of the columns of a roofline, the simplest first."""


class Roofline(NamedTuple):
    """Seconds of a GEMM: for its start, for each MAC, and for each element moved."""

    start: float
    compute: float
    traffic: float

    def seconds(self, shape: Shape, rows: Floats) -> Floats:
        """Return the time of a shape at each number of rows."""
        seconds: Floats = self.of_work(*work_of(np.asarray([shape], float), rows))[0]
        return seconds

    def of_work(self, macs: Floats, elements: Floats) -> Floats:
        """Return the times of arrays of MACs and of elements moved, of the same shape."""
        seconds: Floats = self.start + self.compute * macs + self.traffic * elements
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The measured shapes at every number of rows at which any shape was measured.

    Args:
        rows: shape (rows,).
        shapes: shape (shapes, 3).
        seconds, macs, elements: on each shape's curve, shape (shapes, rows).
        measured: whether the time is a measured point, shape (shapes, rows).
        octaves_outside: squared octaves outside the shape's measured rows, shape (shapes, rows).
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
    """Return the table of the measured shapes."""
    rows = np.array(sorted({size for series in shapes.values() for size in series.sizes}))
    curves, sizes = [*shapes.values()], np.array(list(shapes), float)
    seconds = np.concatenate(
        [
            curve_through(
                sizes=curve.sizes, seconds=curve.medians, alpha_seconds=alpha_seconds
            ).seconds_at(rows)
            for curve in curves
        ]
    )
    macs, elements = work_of(sizes, rows)
    measured = np.zeros(seconds.shape, bool)
    numbers = np.repeat(range(len(curves)), [len(curve.sizes) for curve in curves])
    places = np.searchsorted(rows, [size for curve in curves for size in curve.sizes])
    measured[numbers, places] = True
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
    """Return the MACs, and the elements read and written, each of shape (shapes, rows)."""
    num_experts, d_in, d_out = shapes.T[:, :, None]
    return (num_experts * rows * d_in * d_out, num_experts * (rows * (d_in + d_out) + d_in * d_out))


def roofline_of(table: Table, use: Bools) -> Roofline:
    """Return the non-negative roofline with the least squared relative error.

    seconds = start + MACs · compute + elements moved · traffic

    Args:
        use: mask of the shapes that it is fitted to, shape (shapes,).
    """
    measured = table.measured & use[:, None]
    seconds = table.seconds[measured]
    work = [np.ones_like(seconds), table.macs[measured], table.elements[measured]]
    return Roofline(*_non_negative_fit(np.stack(work, axis=1) / seconds[:, None]))


def _non_negative_fit(features: Floats) -> list[float]:
    """Return x ≥ 0 with features · x nearest to 1.

    The best fit is the best over all subsets of independent columns: what dependent columns reach,
    fewer of them reach as well (Carathéodory). A least-squares fit to some columns equals the fit
    to the same columns of R, from the QR decomposition of all of them.

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
    fitted = next(entries for distance, entries in fits if distance <= nearest)
    return cast("list[float]", (fitted / largest).tolist())


# The error of a shape that was not measured, if no second shape can check it:
# the largest 95th percentile of the gate's "usable".
_UNCHECKED_SHAPE_ERROR = 0.30


FADE = 0.5
"""Share of a shape's ratio to other shapes that remains an octave beyond its measured rows."""


MOST_LEFT_OUT = 32
"""Largest number of shapes that are left out to take errors; tables have hundreds."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface(Tables):
    """The measured GEMMs of one dtype and one form, over (num_experts, d_in, d_out) and rows.

    A measured shape has a curve over rows. Any other shape takes the roofline fitted to all
    measured shapes, times a mean ratio. The ratio is measured over roofline time at the same number
    of rows, weighted by nearness in log sizes. The rate never exceeds the best measured rate.

    Args:
        shapes: times over rows of each measured shape; not empty.
        family: name of the shapes together, which share one systematic error.
        alpha_seconds: start-up time of the dtype's line.
        measured_error: typical error of a measured shape's curve; None to estimate it from them.
    """

    shapes: Mapping[Shape, Series]
    family: str
    alpha_seconds: float
    measured_error: float | None = None

    @cached_property
    def relative_error(self) -> float:
        """The typical error of a measured shape between its measured rows."""
        if self.measured_error is not None:
            return self.measured_error
        errors = self.row_errors()
        return statistics.median(errors) if errors else ASSUMED_RELATIVE_ERROR

    @cached_property
    def shape_error(self) -> float:
        """The typical error of an unmeasured shape, from leaving each measured shape out."""
        errors = self.shape_errors()
        typical = statistics.median(errors) if errors else _UNCHECKED_SHAPE_ERROR
        return max(self.relative_error, typical)

    @once(lambda shape: shape)
    def complete_series(self, shape: Shape) -> Series:
        """Return a known shape's times, completed at the rows at which other shapes were measured.

        The added times are the blend of the other shapes, times this shape's ratio to it. The
        ratio's logarithm is interpolated between its rows, and halves with each octave beyond them.
        """
        measured, table = self.shapes[shape], self._table
        if len(self.shapes) == 1:
            return measured
        blend = self._blend(shape, self._all_but(shape), 0.0)
        rows, all_rows = np.log2(measured.sizes), np.log2(table.rows)
        [blended] = blend.seconds_at(np.array(measured.sizes))
        beyond = np.maximum(np.maximum(rows[0] - all_rows, all_rows - rows[-1]), 0.0)
        ratios = np.interp(all_rows, rows, np.log(measured.medians / blended)) * FADE**beyond
        [seconds] = blend.seconds_at(table.rows) * np.exp(ratios)
        points = dict(zip(table.rows.tolist(), seconds.tolist(), strict=True))
        points.update(zip(measured.sizes, measured.medians, strict=True))
        return series_of(points.items())

    @once(lambda shape: shape)
    def blend(self, shape: Shape) -> Curve:
        """Return the curve over rows of a shape that was not measured."""
        return self._blend(shape, np.ones(len(self.shapes), bool), self.shape_error)

    def octaves_outside(self, shape: Shape) -> float:
        """Return the octaves by which the shape lies outside the measured shapes; 0 inside."""
        return sum(
            abs(math.log2(size / min(max(size, min(sizes)), max(sizes))))
            for size, sizes in zip(shape, zip(*self.shapes, strict=True), strict=True)
        )

    @property
    def rows_range(self) -> tuple[float, float]:
        """The fewest and the most rows measured for any shape."""
        sizes = [size for series in self.shapes.values() for size in series.sizes]
        return min(sizes), max(sizes)

    def row_errors(self) -> list[float]:
        """Return leave-one-out errors over the rows of at most `MOST_LEFT_OUT` measured shapes."""
        return [
            error
            for series in _some([*self.shapes.values()])
            for error in interpolation_errors(
                sizes=series.sizes, seconds=series.medians, alpha_seconds=self.alpha_seconds
            )
        ]

    def shape_errors(self) -> list[float]:
        """Return |predicted / measured − 1| of at most `MOST_LEFT_OUT` shapes, each left out."""
        if len(self.shapes) == 1:
            return []
        errors = []
        for shape in _some(list(self.shapes)):
            blended, _ = self._blend_times(shape, self._all_but(shape))
            [rising], _ = never_falling(blended[None])
            predicted = dict(zip(self._table.rows.tolist(), rising.tolist(), strict=True))
            series = self.shapes[shape]
            errors += [
                abs(predicted[size] / seconds - 1)
                for size, seconds in zip(series.sizes, series.medians, strict=True)
            ]
        return errors

    def _all_but(self, shape: Shape) -> Bools:
        return np.array([measured != shape for measured in self.shapes])

    @cached_property
    def _table(self) -> Table:
        return table_of(self.shapes, self.alpha_seconds)

    def _blend(self, shape: Shape, use: Bools, relative_error: float) -> Curve:
        """Return the curve blended from the shapes in `use`.

        Beyond the largest measured number of rows it grows as the roofline does. The last time may
        be all start-up, which more rows do not repeat.
        """
        seconds, best_rate = self._blend_times(shape, use)
        least, rows = math.prod(shape) / best_rate, self._table.rows[-1]
        modelled, twice = self._roofline(use).seconds(shape, np.array([rows, 2 * rows]))
        growth = float((twice / modelled - 1) * seconds[-1] / rows)
        return curve_through(
            sizes=self._table.rows.tolist(),
            seconds=seconds.tolist(),
            alpha_seconds=self.alpha_seconds,
            relative_error=relative_error,
            least_seconds_per_size=least,
            growth_seconds=max(growth, least),
        )

    def _blend_times(self, shape: Shape, use: Bools) -> tuple[Floats, float]:
        """Return the times at the table's rows, blended from shapes in `use`, and the best rate."""
        table, roofline, sizes = self._table, self._roofline(use), np.asarray(shape, float)
        [macs], _ = work_of(sizes[None], table.rows)
        correction = np.log(table.seconds / roofline.of_work(table.macs, table.elements))
        octaves = (np.log2(table.shapes / sizes) ** 2).sum(axis=1)
        with np.errstate(divide="ignore"):  # distance 0 is the shape itself, which `use` excludes
            near = 1 / np.square(octaves[:, None] + table.octaves_outside)
        weights = np.where(use[:, None], near, 0.0)
        mean = (weights * correction).sum(axis=0) / weights.sum(axis=0)
        seconds = roofline.seconds(shape, table.rows) * np.exp(mean)
        best_rate = float(table.best_rates[use].max())
        return np.maximum(seconds, macs / best_rate), best_rate

    @once(lambda use: use.tobytes())
    def _roofline(self, use: Bools) -> Roofline:
        return roofline_of(self._table, use)


def _some(values: Sequence[_Value]) -> Sequence[_Value]:
    """Return at most `MOST_LEFT_OUT` of the values, evenly spaced."""
    num = min(MOST_LEFT_OUT, len(values))
    return [values[place * len(values) // num] for place in range(num)]
