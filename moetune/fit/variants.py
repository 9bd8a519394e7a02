"""Variants of a profile: costs drawn within the noise of its samples and the errors of its fits."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cost_keys import CostKey
from moetune.domain.costs import Costs, Estimate, Refit
from moetune.domain.interference import SpeedTable
from moetune.domain.once import Tables, once
from moetune.domain.profile import Profile
from moetune.fit.costs import ProfileCosts
from moetune.fit.curve import Curve, Line, curve_through
from moetune.fit.extrapolation import MEDIAN_OF_ABSOLUTE_NORMAL
from moetune.fit.index import Basis, Blend, Points, ProfileIndex, index_of
from moetune.fit.interference import measured_speeds
from moetune.fit.operations import Curves
from moetune.fit.pool import InterferenceKey, resampled_medians

# The largest standard deviation of a common factor's logarithm: two in three draws within a
# factor of 2. Two points predict each other, so their leave-one-out error may be a factor of 900
# if a start-up time dominates. That shows a lack of data: no machine varies by so much.
_MAX_SPREAD = math.log(2)
NUM_RESAMPLES, RESAMPLING_SEED = 100, 0
"""Number and seed of the draws behind a plan's spread and the bands of figures."""


def resample_costs(
    profile: Profile, *, num: int, seed: int, allow_modelled: bool
) -> tuple[Refit, ...]:
    """Return `num` costs drawn within the noise of the samples and the errors of the fits.

    In each draw every measured point takes the median of its resampled raw times, independent of
    its neighbours. Every curve takes one log-normal factor with the curve's leave-one-out error,
    limited to a spread of a factor of 2. Noise of points averages out over a plan, a smooth error
    of a fit does not. Beyond the measured sizes a curve is off by a normal number of spreads of
    `fit.extrapolation`. Each stand-in for another operation gets a separate factor. Lines without
    samples have α and β each changed by their assumed error. Interference factors come from
    resampled raw times. Factors that were set by hand, and differ from the samples, stay fixed.

    An operation is drawn when first needed. Its draws depend on the seed and on the operation
    alone, not on the order of the queries.
    """
    index, noise = index_of(profile), _Noise(num=num, seed=seed)
    return tuple(
        DrawnCosts(index=index, noise=noise, allow_modelled=allow_modelled, chosen=(draw,))
        for draw in range(num)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Noise(Tables):
    """All draws of an operation at once, made when the first draw is needed."""

    num: int
    seed: int

    @once(lambda points: points.label)
    def medians(self, points: Points) -> Floats:
        """Return bootstrap medians of the points, shape (draws, points)."""
        return resampled_medians(
            times=points.series.times, num=self.num, rng=self._rng(points.label)
        )

    @once(lambda label: label)
    def deviates(self, label: str) -> Floats:
        """Return two independent standard normal numbers for each draw, shape (2, draws)."""
        return self._rng(label).normal(size=(self.num, 2)).T

    @once(lambda times: "interference")  # noqa: ARG005 - of one profile
    def overlapped_medians(self, times: Mapping[InterferenceKey, tuple[float, ...]]) -> Floats:
        """Return medians of operations alone and in overlap, shape (operations, draws)."""
        return resampled_medians(
            times=list(times.values()), num=self.num, rng=self._rng("interference")
        ).T

    def _rng(self, label: str) -> "np.random.Generator":
        # Not hash(): it differs between processes.
        return np.random.default_rng([self.seed, zlib.crc32(label.encode())])


class DrawnCosts(ProfileCosts):
    """Costs of a draw; of several draws, times are arrays and a single number is refused."""

    def __init__(
        self, *, index: ProfileIndex, noise: _Noise, allow_modelled: bool, chosen: tuple[int, ...]
    ) -> None:
        curves = _DrawnCurves(noise, chosen)
        super().__init__(index=index, curves=curves, allow_modelled=allow_modelled)
        self.noise, self.chosen, self._allow_modelled = noise, chosen, allow_modelled

    def together(self, refits: Sequence[Refit]) -> Costs:
        """Return the costs of several draws as one object; TypeError for other profiles' draws."""
        drawn = [
            costs for costs in refits if isinstance(costs, DrawnCosts) and costs.noise is self.noise
        ]
        if len(drawn) < len(refits):
            raise TypeError("refits of different profiles have no common costs")
        chosen = tuple(draw for costs in drawn for draw in costs.chosen)
        return self.noise.remembered(
            ("together", chosen),
            lambda: DrawnCosts(
                index=self._index, noise=self.noise, allow_modelled=self._allow_modelled,
                chosen=chosen,
            ),
        )  # fmt: skip

    def _times(self, key: CostKey, sizes: Floats) -> Estimate[Floats]:
        if len(self.chosen) == 1:
            return super()._times(key, sizes)
        return self._operations.remembered((key, sizes.item()), lambda: self._drawn(key, sizes))

    def _drawn(self, key: CostKey, size: Floats) -> Estimate[Floats]:
        seconds = self._predictor(key).seconds_at(size)[:, 0]
        return Estimate(np.broadcast_to(seconds, len(self.chosen)), trust="measured")


class _DrawnCurves(Curves):
    """The curves, lines and blends of the chosen draws."""

    def __init__(self, noise: _Noise, chosen: tuple[int, ...]) -> None:
        self._noise, self._chosen = noise, list(chosen)

    def speeds(self, index: ProfileIndex) -> SpeedTable:
        """Return the interference factors of each draw, from resampled raw times."""
        nominal, times = super().speeds(index), index.pool.interference
        if not times or not index.has_measured_interference:
            return nominal
        drawn = self._noise.overlapped_medians(times)[:, self._chosen]
        return {**nominal, **measured_speeds(dict(zip(times, drawn, strict=True)))}

    def times(self, basis: Basis) -> Curve | Line:
        """Return the curves, or lines, of the chosen draws."""
        match basis:
            case Points():
                factors, _ = self._factors(basis.family, basis.relative_error)
                return curve_through(
                    sizes=basis.series.sizes,
                    seconds=factors * self._noise.medians(basis)[self._chosen],
                    alpha_seconds=factors * basis.alpha_seconds,
                    relative_error=basis.relative_error,
                    deviates=self._beyond(basis.family),
                )
            case Blend():
                factors, _ = self._factors(basis.family, basis.curve.relative_error)
                return basis.curve.scaled(factors, self._beyond(basis.family))
            case Line():
                for_alpha, for_beta = self._factors(basis.label, basis.relative_error)
                return replace(basis, alpha_factors=for_alpha, beta_factors=for_beta)

    def factors(self, label: str, spread: float) -> Floats:
        """Return log-normal factors with that spread."""
        if not spread:
            return super().factors(label, spread)
        deviates: Floats = self._noise.deviates(label)[0, self._chosen, None]
        return np.exp(spread * deviates)

    def _factors(self, family: str, relative_error: float) -> Floats:
        """Return two log-normal factors with that median absolute error, shape (2, draws, 1)."""
        spread = min(relative_error / MEDIAN_OF_ABSOLUTE_NORMAL, _MAX_SPREAD)
        return np.exp(spread * self._noise.deviates(f"{family}: factors")[:, self._chosen, None])

    def _beyond(self, family: str) -> Floats:
        return self._noise.deviates(f"{family}: beyond")[:, self._chosen, None]
