"""Predictors: curves and lines of one operation, with the trust in their times."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moetune.domain.arrays import Floats, array_of, floats_of, is_many
from moetune.domain.costs import Doubt, Estimate, Trust, least_trust
from moetune.domain.interference import Interference
from moetune.fit.curve import Curve, Line, curve_through
from moetune.fit.index import Points, ProfileIndex
from moetune.fit.reference import Origin


class Predictor(Protocol):
    """Times of one operation over its size, or over an array of sizes (`domain.costs.Costs`)."""

    def predict(self, size: float) -> Estimate:
        """Return the time at that size."""
        ...


class Curves(Protocol):
    """Source of predictors for points, lines and blends: nominal ones, or a random draw."""

    def interference(self, index: ProfileIndex) -> Interference:
        """Return how operations of different classes disturb each other."""
        ...

    def through(self, points: Points) -> Predictor:
        """Return the curve through the points."""
        ...

    def line(self, line: Line, *, label: str) -> Line:
        """Return the line of the operation with that label."""
        ...

    def blend(self, curve: Curve, *, family: str) -> Predictor:
        """Return the curve that was blended from that family's shapes."""
        ...

    def stand_in(self, inner: Predictor, *, spread: float, label: str) -> Predictor:
        """Return what predicts another operation than its own with that spread.

        Args:
            label: of the operation that stands in.
        """
        ...

    def named(self, inner: Predictor, name: "Name") -> Predictor:
        """Return the predictor of the operation with that name."""
        ...


class ExactCurves:
    """Everything as it was measured or published."""

    def interference(self, index: ProfileIndex) -> Interference:
        """Return the profile's factors."""
        return index.profile.interference

    def through(self, points: Points) -> Curve:
        """Return the curve through the medians."""
        return curve_through(
            sizes=points.series.sizes,
            seconds=points.series.medians,
            alpha_seconds=points.alpha_seconds,
            relative_error=points.relative_error,
        )

    def line(self, line: Line, *, label: str) -> Line:  # noqa: ARG002 - the protocol has it
        """Return the line itself."""
        return line

    def blend(self, curve: Curve, *, family: str) -> Curve:  # noqa: ARG002 - the protocol has it
        """Return the curve itself."""
        return curve

    def stand_in(self, inner: Predictor, *, spread: float, label: str) -> Predictor:  # noqa: ARG002 - the protocol has it
        """Return the times themselves."""
        return inner

    def named(self, inner: Predictor, name: "Name") -> Predictor:
        """Return predictions that name what was not measured."""
        return Named(inner=inner, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """Predictions of a stand-in, trusted no more than `cap`."""

    inner: Predictor
    cap: Trust

    def predict(self, size: float) -> Estimate:
        """Return the inner time with no better a label than the cap."""
        found = self.inner.predict(size)
        trust = least_trust((found.trust, self.cap))
        if trust == found.trust:
            return found
        return Estimate(seconds=found.seconds, trust=trust, doubts=found.doubts)


def capped(inner: Predictor, cap: Trust) -> Predictor:
    """Return the predictor, trusted no more than `cap`."""
    return inner if cap == "measured" else Capped(inner=inner, cap=cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromTable:
    """Predictions of which those beside the samples' sizes are a table's: "modelled".

    Args:
        table: predicts there.
    """

    inner: Predictor
    table: Predictor
    origin: Origin

    def predict(self, size: float) -> Estimate:
        """Return the inner time, or the table's with its label."""
        if is_many(size):
            return self._many(floats_of(size))
        if not self.origin.covers(size):
            return self.inner.predict(size)
        found = self.table.predict(size)
        return Estimate(seconds=found.seconds, trust="modelled", doubts=found.doubts)

    def _many(self, sizes: Floats) -> Estimate:
        if not self.origin.has_samples:
            return self.table.predict(array_of(sizes))
        inner, table = (one.predict(array_of(sizes)).seconds for one in (self.inner, self.table))
        is_inner = (self.origin.low <= sizes) & (sizes <= self.origin.high)
        return Estimate(seconds=array_of(np.where(is_inner, inner, table)), trust="measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Predictions of a random draw for another operation, off by a factor of their own."""

    inner: Predictor
    factor: float

    def predict(self, size: float) -> Estimate:
        """Return the inner time multiplied."""
        found = self.inner.predict(size)
        seconds = found.seconds * self.factor
        return Estimate(seconds=seconds, trust=found.trust, doubts=found.doubts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """An operation in words, for doubts about its times.

    Args:
        unit: of its sizes.
        low, high: smallest and largest measured size.
        stand_in: what stands in for it; "" where the operation itself was measured.
    """

    operation: str
    unit: str
    low: float
    high: float
    stand_in: str = ""

    def doubt(self, size: float) -> Doubt:
        """Return the doubt about that size."""
        if self.stand_in:
            return Doubt(
                operation=self.operation, size=size, unit=self.unit, stand_in=self.stand_in
            )
        return Doubt(
            operation=self.operation, size=size, unit=self.unit, low=self.low, high=self.high
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Predictions that name what was neither measured nor interpolated."""

    inner: Predictor
    name: Name

    def predict(self, size: float) -> Estimate:
        """Return the inner estimate, with a doubt where its trust is low."""
        found = self.inner.predict(size)
        if found.trust in {"measured", "interpolated"} or is_many(size):
            return found
        doubts = (self.name.doubt(size),)
        return Estimate(seconds=found.seconds, trust=found.trust, doubts=doubts)


class Remembered:
    """Predictions that are computed once for each size; arrays of sizes each time."""

    def __init__(self, inner: Predictor) -> None:
        self._inner = inner
        self._known: dict[float, Estimate] = {}

    def predict(self, size: float) -> Estimate:
        """Return the inner estimate."""
        if is_many(size):
            return self._inner.predict(size)
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._inner.predict(size)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """Predictions at `factor` times the size."""

    inner: Predictor
    factor: float

    def predict(self, size: float) -> Estimate:
        """Return the inner time at the multiplied size."""
        return self.inner.predict(self.factor * size)


def stretched(inner: Predictor, factor: float) -> Predictor:
    """Return the predictor at `factor` times the size."""
    return inner if factor == 1.0 else Stretched(inner=inner, factor=factor)
