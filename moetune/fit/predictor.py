"""Predictors: curves and lines of one operation, with the trust in their times."""

from dataclasses import dataclass
from typing import Protocol

from moetune.domain.costs import Estimate, Interference, Trust, least_trust
from moetune.fit.curve import Curve, Line, curve_through
from moetune.fit.index import Points, ProfileIndex


class Predictor(Protocol):
    """Times of one operation over its size."""

    def predict(self, size: float) -> Estimate:
        """Return the time at that size."""
        ...


class Curves(Protocol):
    """Source of predictors for points, lines and blends: nominal ones, or a random draw."""

    def interference(self, index: ProfileIndex) -> Interference:
        """Return how operations of different classes disturb each other."""
        ...

    def through(self, points: Points) -> Curve:
        """Return the curve through the points."""
        ...

    def line(self, line: Line, *, label: str) -> Line:
        """Return the line of the operation with that label."""
        ...

    def blend(self, curve: Curve, *, family: str) -> Curve:
        """Return the curve that was blended from that family's shapes."""
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
        return Estimate(seconds=found.seconds, trust=trust, relative_error=found.relative_error)


def capped(inner: Predictor, cap: Trust) -> Predictor:
    """Return the predictor, trusted no more than `cap`."""
    return inner if cap == "measured" else Capped(inner=inner, cap=cap)


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
