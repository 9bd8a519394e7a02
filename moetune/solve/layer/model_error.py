"""Draws of the model's error: factors of predicted steps, besides the refits of their costs."""

import math
import zlib
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from moetune.domain.constraints import Strategy
from moetune.domain.costs import ModelError
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors

_SEED = 0


class ErrorDraws:
    """Log-normal factors of whole models' steps, one for each refit.

    Args:
        num: refits. A single one is the nominal costs, which count as certain.
    """

    def __init__(self, error: ModelError, *, num: int) -> None:
        self._error = error if num > 1 else ModelError()
        self._deviates = Deviates(num)

    def common(self, draw: int) -> float:
        """Return the factor of all choices."""
        return math.exp(self._error.common * self._deviate("all", draw))

    def own(self, name: str, draw: int) -> float:
        """Return the factor of the choice of that name."""
        return math.exp(self._error.own * self._deviate(name, draw))

    def _deviate(self, name: str, draw: int) -> float:
        return self._deviates.of(name)[draw]


class StepErrorDraws:
    """Draws of a layer's error by number of chunks, around the expected one.

    Args:
        num: refits. A single one is the nominal costs, which count as certain.
    """

    def __init__(self, errors: StepErrors, *, num: int) -> None:
        self._errors = errors if num > 1 else NO_STEP_ERRORS
        self._deviates = Deviates(num)
        self._found: dict[tuple[Strategy, int], NDArray[np.float64]] = {}
        self._logs: dict[Strategy, list[list[float]]] = {}

    def factor(self, strategy: Strategy, degree: int, draw: int) -> float:
        """Return the factor of a phase in so many chunks."""
        return float(self.factors(strategy, degree)[draw])

    def factors(self, strategy: Strategy, degree: int) -> NDArray[np.float64]:
        """Return the factor of each draw, shape (draws,)."""
        name: Strategy = strategy if degree > 1 else "none"  # one chunk reuses no memory
        if (name, degree) not in self._found:
            drawn = self._errors.deviations(degree, self._at_octaves(name))
            self._found[name, degree] = np.array(drawn)
        return self._found[name, degree]

    def _at_octaves(self, name: Strategy) -> list[list[float]]:
        """Return draws of the error's logarithm at each octave of chunks."""
        if name not in self._logs:
            octaves = range(len(self._errors.mean))
            deviates = [self._deviates.of(f"{name} {at}") for at in octaves]
            of_draws = list(zip(*deviates, strict=True))
            self._logs[name] = [self._errors.at_octave(at, of_draws) for at in octaves]
        return self._logs[name]


class Deviates:
    """Standard normal deviates by name: the quantiles in random order, the same in every run.

    Few draws have the spread of the distribution, too.
    """

    def __init__(self, num: int) -> None:
        normal = NormalDist()
        self._quantiles = [normal.inv_cdf((at + 0.5) / num) for at in range(num)]
        self._found: dict[str, list[float]] = {}

    def of(self, name: str) -> list[float]:
        """Return the deviates of that name, one a draw."""
        if name not in self._found:
            # Not hash(): it differs between processes.
            rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
            self._found[name] = rng.permutation(self._quantiles).tolist()
        return self._found[name]
