"""Arrays in the place of numbers, of many refits or sizes: sums and products hold for both."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def is_many(number: object) -> bool:
    """Return whether an array stands in the place of a number."""
    return isinstance(number, np.ndarray)


def array_of(numbers: Sequence[float] | NDArray[np.generic]) -> float:
    """Return an array in the place of a number."""
    return cast("float", np.asarray(numbers))


def as_number(numbers: Floats) -> float:
    """Return the number of an array without dimensions, else the array in the place of one."""
    return cast("float", numbers if numbers.ndim else float(numbers))


def floats_of(numbers: float) -> Floats:
    """Return what stands in the place of a number as the array that it is."""
    return np.asarray(numbers, float)


def shorter(first: float, second: float) -> float:
    """Return the smaller of two times, or of each two in arrays."""
    return as_number(np.minimum(first, second))


def longer(first: float, second: float) -> float:
    """Return the larger of two times, or of each two in arrays."""
    return as_number(np.maximum(first, second))


def as_rows(numbers: Sequence[float], num: int) -> Floats:
    """Return each number, or array of `num`, as a row, shape (numbers, num)."""
    return np.array([np.broadcast_to(number, num) for number in numbers], float)
