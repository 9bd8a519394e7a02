"""Corrections of a profile's costs by what jobs observed of their operations."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moetune.domain.errors import InputError, check_positive
from moetune.domain.units import format_bytes

CorrectedOp = Literal[
    "all_to_all", "all_reduce", "reduce_scatter", "experts_forward", "experts_backward"
]
CORRECTED_OPS: tuple[CorrectedOp, ...] = get_args(CorrectedOp)
LARGEST_FACTOR = 4.0
"""A profile that is wrong by more describes another machine: its shape is wrong, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A factor on the predicted times of one operation, at the size at which it was observed.

    Args:
        group_size: ranks of a collective; 0 for the experts' GEMMs.
        size: bytes of a collective; MACs of a GEMM, all local experts together.
        factor: observed over predicted.
        num_calls, num_batches: observed calls behind it, and how often they were sent.

    Raises:
        InputError: a factor out of bounds, or a count below 1.
    """

    op: CorrectedOp
    group_size: int
    size: int
    factor: float
    num_calls: int
    num_batches: int

    def __post_init__(self) -> None:
        check_positive(self, "size", "num_calls", "num_batches")
        if not 1 / LARGEST_FACTOR <= self.factor <= LARGEST_FACTOR:
            raise InputError(
                f"{self.op}: a correction must be from {1 / LARGEST_FACTOR:g} to "
                f"{LARGEST_FACTOR:g}, got {self.factor:g}"
            )

    @property
    def words(self) -> str:
        """The correction in a sentence, as "all_to_all × 1.92 around 2.0 MiB (12 calls …)"."""
        size = format_bytes(self.size) if self.group_size else f"{self.size:.3g} MACs"
        return (
            f"{self.op.replace('_', ' ') if not self.group_size else self.op} × {self.factor:.2f} "
            f"around {size} ({self.num_calls} observed calls in {self.num_batches} batches)"
        )


def distance_octaves(size: float, other: float) -> float:
    """Return how many times the larger size is twice the smaller one."""
    return abs(math.log2(size / other))
