"""Predictions of one operation: a curve, and what is known of where it is from."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cost_keys import CostKey
from moetune.domain.costs import Doubt, Estimate, Trust, least_trust
from moetune.domain.interference import Interference
from moetune.fit.curve import Curve, Line, curve_through
from moetune.fit.index import Basis, Blend, Points, ProfileIndex
from moetune.fit.reference import Origin

_ONE = np.ones((1, 1))


class Times(Protocol):
    """Times of one operation over its size: of one curve, or of one for each random draw."""

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes, shape (curves, sizes)."""
        ...

    def trust(self, size: float) -> Trust:
        """Return the trust in the time at a size."""
        ...


class Curves:
    """Source of curves: everything as it was measured or published."""

    def interference(self, index: ProfileIndex) -> Interference:
        """Return the profile's factors."""
        return index.profile.interference

    def times(self, basis: Basis) -> Curve | Line:
        """Return the curve through points, the curve of a blend, or the line."""
        match basis:
            case Points():
                return curve_through(
                    sizes=basis.series.sizes,
                    seconds=basis.series.medians,
                    alpha_seconds=basis.alpha_seconds,
                    relative_error=basis.relative_error,
                )
            case Blend():
                return basis.curve
            case Line():
                return basis

    def factors(self, label: str, spread: float) -> Floats:  # noqa: ARG002 - draws differ
        """Return what multiplies the times of what has that error besides, shape (curves, 1).

        Args:
            label: of the error's cause.
        """
        return _ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Times of one operation, with the trust in them.

    Args:
        key: the operation, as doubts about it name it; None where doubts are not told.
        times: of itself, or of what stands in for it.
        stretch: size of that for one of the operation's.
        factors: of what stands in, shape (curves, 1).
        cap: most that a time can be trusted.
        stand_in: what stands in; "" for the operation itself.
        low, high: smallest and largest measured size.
        origin: of points from tables; None without any.
        table_factors: of times that are from the table.
    """

    key: CostKey | None
    times: Times
    stretch: float = 1.0
    factors: Floats = field(default_factory=lambda: _ONE)
    cap: Trust = "measured"
    stand_in: str = ""
    low: float = 0.0
    high: float = 0.0
    origin: Origin | None = None
    table_factors: Floats = field(default_factory=lambda: _ONE)

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes, shape (curves, sizes)."""
        seconds = self.factors * self.times.seconds_at(self.stretch * sizes)
        if self.origin is None or self.table_factors is _ONE:
            return seconds
        is_sample = (self.origin.low <= sizes) & (sizes <= self.origin.high)
        return np.where(is_sample, seconds, self.table_factors * seconds)

    def trust(self, size: float) -> Trust:
        """Return the trust in the time at a size."""
        if self.origin is not None and self.origin.covers(size):
            return least_trust(("modelled", self.cap))
        return least_trust((self.times.trust(self.stretch * size), self.cap))

    def estimate(self, size: float) -> Estimate:
        """Return the time of a single curve at one size."""
        trust = self.trust(size)
        seconds = float(self.seconds_at(np.array([size]))[0, 0])
        if self.key is None or trust in {"measured", "interpolated"}:
            return Estimate(seconds=seconds, trust=trust)
        return Estimate(seconds=seconds, trust=trust, doubts=(self._doubt(self.key, size),))

    def _doubt(self, key: CostKey, size: float) -> Doubt:
        if self.stand_in:
            return Doubt(operation=key.words, size=size, unit=key.unit, stand_in=self.stand_in)
        return Doubt(operation=key.words, size=size, unit=key.unit, low=self.low, high=self.high)
