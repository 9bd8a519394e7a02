"""Blocks of which two batches take turns, as measured beside the timeline of their operations."""

import math
from dataclasses import dataclass

from moetune.domain.errors import InputError
from moetune.domain.samples import TurnsPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRecord:
    """Blocks in turns, forward and backward passes of both batches.

    Args:
        predicted_seconds: from the profile's operations.
    """

    point: TurnsPoint
    predicted_seconds: float
    measured_seconds: float

    def __post_init__(self) -> None:
        times = self.predicted_seconds, self.measured_seconds
        if not all(0 < one < math.inf for one in times):
            raise InputError("the times of blocks in turns must be positive and finite")

    @property
    def residual(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured_seconds / self.predicted_seconds)
