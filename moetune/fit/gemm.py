"""Matrix products of expert shapes, measured or between measured ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations

import numpy as np

from moetune.fit.curve import ASSUMED_RELATIVE_ERROR, Curve, curve_through, leave_one_out
from moetune.fit.line import Floats
from moetune.fit.pool import Series, Shape

# The error of a shape that was not measured, when no second shape is there to check it:
# the largest 95th percentile of the gate's "usable".
_UNCHECKED_SHAPE_ERROR = 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """seconds = start + MACs · compute + elements moved · traffic, none of them negative."""

    start_seconds: float
    seconds_per_mac: float
    seconds_per_element: float

    def seconds(self, shape: Shape, rows: float) -> float:
        """Return the time of one product."""
        macs, elements = _work(shape, rows)
        return (
            self.start_seconds + self.seconds_per_mac * macs + self.seconds_per_element * elements
        )


class Surface:
    """The measured products of one dtype and one form, over (num_experts, d_in, d_out) and rows.

    A measured shape has its own curve over rows. Any other shape takes the roofline that fits
    them all best, corrected by what the measured shapes at the same number of rows do better
    or worse than it, the near ones (in log sizes) more than the far ones. The rate never
    exceeds the best that was seen.

    Args:
        shapes: times over rows of each measured shape; at least one.
        family: what the shapes are called together.
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

    @cached_property
    def relative_error(self) -> float:
        """The typical error of a measured shape between its measured rows."""
        if self._relative_error is not None:
            return self._relative_error
        errors = self.row_errors()
        return float(np.median(errors)) if errors else ASSUMED_RELATIVE_ERROR

    @cached_property
    def shape_error(self) -> float:
        """The typical error of a shape that was not measured, by leaving each one out."""
        errors = self.shape_errors()
        typical = float(np.median(errors)) if errors else _UNCHECKED_SHAPE_ERROR
        return max(self.relative_error, typical)

    def series(self, shape: Shape) -> Series | None:
        """Return the shape's times over rows, None where it was not measured."""
        return self._shapes.get(shape)

    def blend(self, shape: Shape) -> Curve:
        """Return the curve over rows of a shape that was not measured."""
        if shape not in self._blends:
            blend = self._blend(shape, self._curves, self._roofline, self.shape_error)
            self._blends[shape] = blend
        return self._blends[shape]

    def covers(self, shape: Shape) -> bool:
        """Return whether the shape lies inside the box of the measured ones."""
        return all(
            min(sizes) <= size <= max(sizes)
            for size, sizes in zip(shape, zip(*self._shapes, strict=True), strict=True)
        )

    def row_errors(self) -> list[float]:
        """Return leave-one-out errors of the rows of each measured shape."""
        return [
            error
            for series in self._shapes.values()
            for error in leave_one_out(
                sizes=series.sizes, seconds=series.medians, alpha_seconds=self.alpha_seconds
            )
        ]

    def shape_errors(self) -> list[float]:
        """Return |predicted / measured − 1| of every point when its shape is left out."""
        if len(self._shapes) == 1:
            return []
        errors = []
        for shape, series in self._shapes.items():
            shapes = {other: one for other, one in self._shapes.items() if other != shape}
            curves = {other: self._curves[other] for other in shapes}
            blend = self._blend(shape, curves, _roofline(shapes), 0.0)
            errors += [
                abs(blend.predict(rows).seconds / seconds - 1)
                for rows, seconds in zip(series.sizes, series.medians, strict=True)
            ]
        return errors

    @cached_property
    def _curves(self) -> dict[Shape, Curve]:
        return {
            shape: curve_through(
                sizes=series.sizes,
                seconds=series.medians,
                alpha_seconds=self.alpha_seconds,
                relative_error=self.relative_error,
            )
            for shape, series in self._shapes.items()
        }

    @cached_property
    def _roofline(self) -> Roofline:
        return _roofline(self._shapes)

    def _blend(
        self, shape: Shape, curves: Mapping[Shape, Curve], roofline: Roofline, error: float
    ) -> Curve:
        best_rate = max(
            _work(other, rows)[0] / seconds
            for other, curve in curves.items()
            for rows, seconds in zip(curve.sizes, curve.seconds, strict=True)
        )
        grid = sorted(set(chain.from_iterable(curve.sizes for curve in curves.values())))
        near = [(other, curve, _distance(shape, other)) for other, curve in curves.items()]
        seconds = []
        for rows in grid:
            total = correction = 0.0
            for other, curve, apart in near:
                weight = (apart + _outside(curve, rows)) ** -2
                total += weight
                modelled = roofline.seconds(other, rows)
                correction += weight * math.log(curve.predict(rows).seconds / modelled)
            wanted = roofline.seconds(shape, rows) * math.exp(correction / total)
            seconds.append(max(wanted, _work(shape, rows)[0] / best_rate))
        return curve_through(
            sizes=grid,
            seconds=seconds,
            alpha_seconds=self.alpha_seconds,
            relative_error=error,
        )


def _work(shape: Shape, rows: float) -> tuple[float, float]:
    """Return the MACs, and the elements read and written, of all experts together."""
    num_experts, d_in, d_out = shape
    return (
        num_experts * rows * d_in * d_out,
        num_experts * (rows * (d_in + d_out) + d_in * d_out),
    )


def _distance(one: Shape, other: Shape) -> float:
    """Return the squared distance in octaves."""
    return sum(math.log2(a / b) ** 2 for a, b in zip(one, other, strict=True))


def _outside(curve: Curve, rows: float) -> float:
    """Return the squared distance in octaves from the curve's measured rows."""
    nearest = min(max(rows, curve.sizes[0]), curve.sizes[-1])
    return math.log2(rows / nearest) ** 2


def _roofline(shapes: Mapping[Shape, Series]) -> Roofline:
    """Return the roofline with the least sum of squared relative errors."""
    points = [
        (*_work(shape, rows), seconds)
        for shape, series in shapes.items()
        for rows, seconds in zip(series.sizes, series.medians, strict=True)
    ]
    macs, elements, seconds = np.asarray(points, float).T
    features = np.stack([np.ones_like(macs), macs, elements], axis=1) / seconds[:, None]
    scale = features.max(axis=0)
    start, compute, traffic = _non_negative_least_squares(features / scale) / scale
    return Roofline(
        start_seconds=float(start),
        seconds_per_mac=float(compute),
        seconds_per_element=float(traffic),
    )


def _non_negative_least_squares(features: Floats) -> Floats:
    """Return x ≥ 0 with features · x nearest to 1, by trying every set of non-zero entries."""
    count = features.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for columns in map(list, combinations(range(count), size)):
            part = features[:, columns]
            found = np.linalg.lstsq(part, np.ones(len(part)))[0]
            missed = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and missed < least:
                best, least = np.zeros(count), missed
                best[columns] = found
    return best
