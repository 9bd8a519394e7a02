"""Draws of the model's error: factors of predicted steps, besides the refits of their costs."""

import math
import zlib
from functools import cached_property
from statistics import NormalDist

import numpy as np

from moetune.domain.constraints import Strategy
from moetune.domain.costs import ModelError

_SEED = 0


class ErrorDraws:
    """Log-normal factors of steps, one for each refit, the same in every run.

    The deviates of a name are the quantiles of a normal distribution in random order, so that
    few draws have its spread, too.

    Args:
        num: refits. A single one is the nominal costs, which count as certain.
    """

    def __init__(self, error: ModelError, *, num: int) -> None:
        self._error = error if num > 1 else ModelError()
        self._num = num
        self._deviates: dict[str, list[float]] = {}

    def common(self, draw: int) -> float:
        """Return the factor of all choices."""
        return math.exp(self._error.common * self._deviate("all", draw))

    def own(self, name: str, draw: int) -> float:
        """Return the factor of the choice of that name."""
        return math.exp(self._error.own * self._deviate(name, draw))

    def of_degree(self, strategy: Strategy, degree: int, draw: int) -> float:
        """Return the factor of a phase in so many chunks.

        The deviate is the mean of three independent ones, an octave apart, that begin at the
        degree's own: near degrees share most of their error (`SHARED_BY_OCTAVES`).
        """
        octave = int(math.log2(degree))
        share = math.log2(degree) - octave
        name = strategy if degree > 1 else "none"  # one chunk reuses no memory
        weights = (1 - share, 1.0, 1.0, share)
        deviate = sum(
            weight * self._deviate(f"{name} {octave + at}", draw)
            for at, weight in enumerate(weights)
        )
        return math.exp(self._error.own * deviate / math.hypot(*weights))

    def _deviate(self, name: str, draw: int) -> float:
        if name not in self._deviates:
            # Not hash(): it differs between processes.
            rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
            self._deviates[name] = rng.permutation(self._quantiles).tolist()
        return self._deviates[name][draw]

    @cached_property
    def _quantiles(self) -> list[float]:
        normal = NormalDist()
        return [normal.inv_cdf((at + 0.5) / self._num) for at in range(self._num)]
