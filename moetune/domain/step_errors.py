"""Whole steps of layers beside the sum of their operations, and the error of predicted steps."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.errors import InputError
from moetune.domain.layer import Workload

SHARED_OCTAVES = 3
"""Octaves from which on the errors of two numbers of chunks have nothing in common; one octave
apart they share 2/3 of their variance, and two octaves apart 1/3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step of a layer as it was measured, beside the sum of its operations.

    Args:
        degree: chunks forward and backward.
        chunks_seconds: of both phases, predicted from the profile's operations.
        overhead_seconds: around them, predicted.
        measured_seconds: of the step.
    """

    workload: Workload
    degree: int
    chunks_seconds: float
    overhead_seconds: float
    measured_seconds: float

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise InputError(f"degree must be at least 1, got {self.degree}")
        times = self.chunks_seconds, self.measured_seconds
        if not all(0 < one < math.inf for one in times) or self.overhead_seconds < 0:
            raise InputError("the times of a step must be positive and finite")

    @property
    def residual(self) -> float:
        """log(measured / predicted) of the phases, the overhead taken as predicted.

        Where that would leave them less than half of the step, the overhead is wrong as well, and
        the residual is that of the whole step.
        """
        left = self.measured_seconds - self.overhead_seconds
        if left < self.measured_seconds / 2:
            predicted = self.chunks_seconds + self.overhead_seconds
            return math.log(self.measured_seconds / predicted)
        return math.log(left / self.chunks_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """log(measured / predicted) of a layer's phases, a normal deviate for each octave of chunks.

    Args:
        mean: at 1, 2, 4 … chunks, as measured steps have shown it.
        roots: (octaves, octaves), a square root of the covariance around it.
        records: the steps behind it; empty where none was measured.
        gain: (octaves, records), what the mean changes by where a record's residual does.
    """

    mean: tuple[float, ...] = (0.0,)
    roots: tuple[tuple[float, ...], ...] = ((0.0,),)
    records: tuple[StepRecord, ...] = ()
    gain: tuple[tuple[float, ...], ...] = ()

    def given(self, residuals: Sequence[float]) -> "StepErrors":
        """Return the errors where the records have other residuals, as under other costs."""
        own = [record.residual for record in self.records]
        moved = list(map(operator.sub, residuals, own))
        changes = (sum(map(operator.mul, row, moved)) for row in self.gain)
        return replace(self, mean=tuple(map(operator.add, self.mean, changes)))

    def factor(self, degree: int) -> float:
        """Return the expected ratio of measured to predicted time in so many chunks."""
        low, high, share = self.place(degree)
        return math.exp((1 - share) * self.mean[low] + share * self.mean[high])

    def place(self, degree: int) -> tuple[int, int, float]:
        """Return the octaves around a number of chunks, and its place between them."""
        octaves = min(math.log2(degree), len(self.mean) - 1)
        low = int(octaves)
        return low, min(low + 1, len(self.mean) - 1), octaves - low


NO_STEP_ERRORS = StepErrors()
"""Predictions that are taken as they are."""
