"""Corrections of a profile's costs by what jobs observed of their operations."""

import math
from collections.abc import Callable, Iterable, Sequence
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


def corrections_words(corrections: Sequence[Correction]) -> tuple[str, ...]:
    """Return each operation's corrections in words.

    As "all_to_all of 2 ranks × 1.92 around 2.00 MiB (12 observed calls)"; of several sizes with the
    smallest and the largest factor and size.
    """
    by_operation: dict[tuple[str, int], list[Correction]] = {}
    for one in corrections:
        by_operation.setdefault((one.op, one.group_size), []).append(one)
    return tuple(_words(group) for group in by_operation.values())


def _words(group: Sequence[Correction]) -> str:
    first = group[0]
    show: Callable[[float], str]
    if first.group_size:
        name, show = f"{first.op} of {first.group_size} ranks", format_bytes
    else:
        name, show = first.op.replace("_", " "), _macs
    factors = dict.fromkeys(f"{one.factor:.2f}" for one in sorted(group, key=_factor))
    sizes = dict.fromkeys(show(one.size) for one in sorted(group, key=_size))
    num_calls = sum(one.num_calls for one in group)
    return f"{name} × {_ends(factors)} around {_ends(sizes)} ({num_calls} observed calls)"


def _macs(size: float) -> str:
    return f"{size:.3g} MACs"


def _factor(one: Correction) -> float:
    return one.factor


def _size(one: Correction) -> int:
    return one.size


def _ends(texts: Iterable[str]) -> str:
    """Return "first to last", or the only one."""
    found = list(texts)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def distance_octaves(size: float, other: float) -> float:
    """Return how many times the larger size is twice the smaller one."""
    return abs(math.log2(size / other))
