"""Draws of the model's error: factors of predicted steps, besides the refits of their costs."""

import zlib
from statistics import NormalDist

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Strategy
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors, at_degree

_SEED = 0


class StepErrorDraws:
    """Draws of a layer's error by number of chunks, around the expected one.

    Args:
        num: refits. A single one is the nominal costs, which count as certain.
    """

    def __init__(self, errors: StepErrors, *, num: int) -> None:
        self._errors = errors if num > 1 else NO_STEP_ERRORS
        self._deviates = Deviates(num)
        self._found: dict[tuple[Strategy, int], Floats] = {}
        self._logs: dict[Strategy, Floats] = {}

    def factors(self, strategy: Strategy, degree: int) -> Floats:
        """Return the factor of each draw, shape (draws,)."""
        name: Strategy = strategy if degree > 1 else "none"  # one chunk reuses no memory
        if (name, degree) not in self._found:
            self._found[name, degree] = np.exp(at_degree(self._at_octaves(name), degree))
        return self._found[name, degree]

    def _at_octaves(self, name: Strategy) -> Floats:
        """Return draws of the error's logarithm at each octave of chunks, (draws, octaves)."""
        if name not in self._logs:
            roots = self._errors.roots
            deviates = [self._deviates.of(f"{name} {at}") for at in range(len(roots))]
            self._logs[name] = np.array(deviates).T @ roots.T
        return self._logs[name]


class Deviates:
    """Standard normal deviates by name: the quantiles in random order, the same in every run.

    Few draws have the spread of the distribution, too.
    """

    def __init__(self, num: int) -> None:
        normal = NormalDist()
        self._quantiles = np.array([normal.inv_cdf((at + 0.5) / num) for at in range(num)])
        self._found: dict[str, Floats] = {}

    def of(self, name: str) -> Floats:
        """Return the deviates of that name, one a draw."""
        if name not in self._found:
            # Not hash(): it differs between processes.
            rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
            self._found[name] = rng.permutation(self._quantiles)
        return self._found[name]
