"""Variants of a profile: costs drawn within the noise of its samples and the errors of its fits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetune.domain.arrays import array_of
from moetune.domain.costs import Costs, Estimate, LinearCost
from moetune.domain.interference import Interference
from moetune.domain.profile import Profile
from moetune.fit.costs import ProfileCosts
from moetune.fit.curve import Curve, Line, curve_through
from moetune.fit.index import Points, ProfileIndex, index_of
from moetune.fit.noise import Noise
from moetune.fit.predictor import Name, Predictor, StandIn

NUM_RESAMPLES, RESAMPLING_SEED = 100, 0
"""Draws behind a plan's own spread, and behind the bands of figures."""


def resample_costs(
    profile: Profile,
    *,
    num: int,
    seed: int,
    allow_modelled: bool = False,
) -> tuple[Costs, ...]:
    """Return `num` costs drawn within the noise of the samples and the errors of the fits.

    In each draw every measured point has the median of raw times drawn again with
    replacement, independent of its neighbours, and every curve one log-normal factor with the
    curve's leave-one-out error, up to a spread of a factor of 2: noise of points averages out
    over a plan, a smooth error of a fit does not. Beyond the measured sizes a curve lies so many
    of `fit.extrapolation`'s spreads beside the nominal one, and what stands in for another
    operation is off by a factor of its own. Lines without samples have α and β each
    changed by their assumed error. Interference factors come from raw times drawn again, unless
    the profile's factors are not those of its samples: then they were set by hand, and hold.

    An operation is drawn when it is first wanted; its draws depend on the seed and on the
    operation alone, not on the order of the queries.

    Args:
        num: how many.
    """
    draws = _Draws(
        index=index_of(profile), noise=Noise(num=num, seed=seed),
        allow_modelled=allow_modelled,
    )  # fmt: skip
    return tuple(_DrawnCosts(draws, draw) for draw in range(num))


def drawn_predictors(
    found: Points | Line, *, label: str, num: int, seed: int
) -> tuple[Predictor, ...]:
    """Return one operation as each of `num` draws of `resample_costs` predicts it.

    Args:
        label: seeds the draws of a line; points have their own label.
    """
    noise = Noise(num=num, seed=seed)
    curves = [_DrawnCurves(noise=noise, draw=draw) for draw in range(num)]
    if isinstance(found, Line):
        return tuple(one.line(found, label=label) for one in curves)
    return tuple(one.through(found) for one in curves)


class _Draws:
    """All draws of a profile's costs."""

    def __init__(self, *, index: ProfileIndex, noise: Noise, allow_modelled: bool) -> None:
        self.index, self.noise = index, noise
        self.allow_modelled = allow_modelled
        self._together: dict[tuple[int, ...], Costs] = {}

    def together(self, draws: tuple[int, ...]) -> Costs:
        """Return costs with an array of seconds in each estimate, one for each of the draws."""
        if draws not in self._together:
            curves = _CurvesOfAll(noise=self.noise, draws=draws)
            self._together[draws] = ProfileCosts(
                index=self.index, curves=curves, allow_modelled=self.allow_modelled
            )
        return self._together[draws]


class _DrawnCosts(ProfileCosts):
    """Costs of one draw."""

    def __init__(self, draws: _Draws, draw: int) -> None:
        curves = _DrawnCurves(noise=draws.noise, draw=draw)
        super().__init__(index=draws.index, curves=curves, allow_modelled=draws.allow_modelled)
        self.draws, self.draw = draws, draw

    def together(self, others: Sequence[Costs]) -> Costs | None:
        """Return the costs of some draws as one; None where they are not all of one profile's."""
        drawn = [one for one in others if isinstance(one, _DrawnCosts)]
        if len(drawn) < len(others) or any(one.draws is not self.draws for one in drawn):
            return None
        return self.draws.together(tuple(one.draw for one in drawn))


class _DrawnCurves:
    """The curves, lines and blends of one draw."""

    def __init__(self, *, noise: Noise, draw: int) -> None:
        self._noise = noise
        self._draw = draw

    def interference(self, index: ProfileIndex) -> Interference:
        return self._noise.interference(index, draws=(self._draw,))

    def through(self, points: Points) -> Curve:
        factor, _ = self._noise.factors(
            points.family, draw=self._draw, relative_error=points.relative_error
        )
        return curve_through(
            sizes=points.series.sizes,
            seconds=(factor * self._noise.medians(points)[self._draw]).tolist(),
            alpha_seconds=factor * points.alpha_seconds,
            relative_error=points.relative_error,
            deviates=self._beyond(points.family),
        )

    def line(self, line: Line, *, label: str) -> Line:
        for_alpha, for_beta = self._noise.factors(
            label, draw=self._draw, relative_error=line.relative_error
        )
        cost = LinearCost(
            alpha_seconds=line.cost.alpha_seconds * for_alpha,
            beta_seconds=line.cost.beta_seconds * for_beta,
        )
        return Line(cost=cost, relative_error=line.relative_error)

    def blend(self, curve: Curve, *, family: str) -> Curve:
        factor, _ = self._noise.factors(
            family, draw=self._draw, relative_error=curve.relative_error
        )
        return replace(curve.scaled(factor), deviates=self._beyond(family))

    def stand_in(self, inner: Predictor, *, spread: float, label: str) -> Predictor:
        deviate, _ = self._noise.deviates(label, draw=self._draw)
        return StandIn(inner=inner, factor=math.exp(spread * deviate))

    def named(self, inner: Predictor, name: Name) -> Predictor:  # noqa: ARG002 - draws name nothing
        return inner

    def _beyond(self, family: str) -> tuple[float, float]:
        return self._noise.deviates(f"{family}: beyond", draw=self._draw)


@dataclass(frozen=True, slots=True)
class _Together:
    """One operation as each draw predicts it: an array of seconds."""

    each: tuple[Predictor, ...]

    def predict(self, size: float) -> Estimate:
        """Return the times at a size, one for each draw."""
        seconds = [one.predict(size).seconds for one in self.each]
        return Estimate(seconds=array_of(np.array(seconds)), trust="measured")


class _CurvesOfAll:
    """The curves, lines and blends of some draws, whose predictions are arrays."""

    def __init__(self, *, noise: Noise, draws: tuple[int, ...]) -> None:
        self._noise, self._draws = noise, draws
        self._each = tuple(_DrawnCurves(noise=noise, draw=draw) for draw in draws)

    def interference(self, index: ProfileIndex) -> Interference:
        return self._noise.interference(index, draws=self._draws)

    def through(self, points: Points) -> Predictor:
        return _Together(tuple(one.through(points) for one in self._each))

    def line(self, line: Line, *, label: str) -> Line:
        costs = [one.line(line, label=label).cost for one in self._each]
        cost = LinearCost(
            alpha_seconds=array_of(np.array([one.alpha_seconds for one in costs])),
            beta_seconds=array_of(np.array([one.beta_seconds for one in costs])),
        )
        return Line(cost=cost, relative_error=line.relative_error)

    def blend(self, curve: Curve, *, family: str) -> Predictor:
        return _Together(tuple(one.blend(curve, family=family) for one in self._each))

    def stand_in(self, inner: Predictor, *, spread: float, label: str) -> Predictor:
        deviates = self._noise.all_deviates(label)[list(self._draws), 0]
        return StandIn(inner=inner, factor=array_of(np.exp(spread * deviates)))

    def named(self, inner: Predictor, name: Name) -> Predictor:  # noqa: ARG002 - draws name nothing
        return inner
