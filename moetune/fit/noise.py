"""Noise of a profile: medians of raw times drawn again, and deviates of its fits' errors."""

import math
import zlib
from collections.abc import Mapping

import numpy as np

from moetune.domain.arrays import Floats, array_of
from moetune.domain.interference import Interference
from moetune.fit.extrapolation import MEDIAN_OF_ABSOLUTE_NORMAL
from moetune.fit.index import Points, ProfileIndex
from moetune.fit.interference import table_of
from moetune.fit.line import resampled_medians
from moetune.fit.pool import InterferenceKey

# The largest standard deviation of a common factor's logarithm: two in three draws within a
# factor of 2. Two points predict each other, so their leave-one-out error may be a factor of 900
# where a start-up time dominates: that shows that nothing is known, and no machine varies as much.
_MAX_SPREAD = math.log(2)


class Noise:
    """All draws of an operation at once, made when the first of them is wanted."""

    def __init__(self, *, num: int, seed: int) -> None:
        self._num = num
        self._seed = seed
        self._medians: dict[str, Floats] = {}
        self._deviates: dict[str, Floats] = {}
        self._times_beside: Floats | None = None
        self._tables: dict[tuple[int, ...], Interference] = {}

    def medians(self, points: Points) -> Floats:
        """Return the points' medians, shape (draws, points)."""
        if points.label not in self._medians:
            self._medians[points.label] = resampled_medians(
                times=points.series.times, num=self._num, rng=self._rng(points.label)
            )
        return self._medians[points.label]

    def factors(self, family: str, *, relative_error: float) -> Floats:
        """Return two independent log-normal factors with that median absolute error, of each draw.

        Returns:
            Shape (2, draws).
        """
        spread = min(relative_error / MEDIAN_OF_ABSOLUTE_NORMAL, _MAX_SPREAD)
        return np.exp(spread * self.deviates(f"{family}: factors"))

    def deviates(self, label: str) -> Floats:
        """Return two independent standard normal numbers of each draw, shape (2, draws)."""
        if label not in self._deviates:
            self._deviates[label] = self._rng(label).normal(size=(self._num, 2)).T
        return self._deviates[label]

    def interference(self, index: ProfileIndex, *, draws: tuple[int, ...]) -> Interference:
        """Return the factors from raw times drawn again: of several draws, arrays of speeds."""
        times = index.pool.interference
        if not times or not index.has_own_interference:
            return index.profile.interference
        if draws not in self._tables:
            self._tables[draws] = self._drawn_table(times, draws)
        return self._tables[draws]

    def _drawn_table(
        self, times: Mapping[InterferenceKey, tuple[float, ...]], draws: tuple[int, ...]
    ) -> Interference:
        if self._times_beside is None:
            self._times_beside = resampled_medians(
                times=list(times.values()), num=self._num, rng=self._rng("interference")
            ).T
        each = self._times_beside[:, list(draws)]
        medians = each[:, 0].tolist() if len(draws) == 1 else map(array_of, each)
        return table_of(dict(zip(times, medians, strict=True)))

    def _rng(self, label: str) -> np.random.Generator:
        # Not hash(): it differs between processes.
        return np.random.default_rng([self._seed, zlib.crc32(label.encode())])
