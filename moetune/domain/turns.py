"""Blocks of which two batches take turns, as measured beside the timeline of their operations."""

import math
from dataclasses import dataclass, field

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError
from moetune.domain.samples import TurnsPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRecord:
    """Blocks in turns, forward and backward passes of both batches.

    Args:
        predicted_seconds: from the profile's operations.
        standard_error: of the residual, from the scatter of its runs; 0 where that is unknown.
    """

    point: TurnsPoint
    predicted_seconds: float
    measured_seconds: float
    standard_error: float = field(default=0.0, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        times = self.predicted_seconds, self.measured_seconds
        if not all(0 < one < math.inf for one in times):
            raise InputError("the times of blocks in turns must be positive and finite")
        if not 0 <= self.standard_error < math.inf:
            raise InputError("the standard error of blocks in turns must be 0 or more, and finite")

    @property
    def residual(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured_seconds / self.predicted_seconds)
