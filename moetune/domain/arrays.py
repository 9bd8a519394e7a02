"""Arrays in the place of numbers: sums and products of times hold for both.

The solvers work out a layer once for many refits of its costs, or for many sizes at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Value = TypeVar("_Value")


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


def shorter(one: float, other: float) -> float:
    """Return the smaller of two times, or of each two in arrays."""
    if is_many(one) or is_many(other):
        return np.minimum(one, other)  # type: ignore[no-any-return]
    return min(one, other)


def longer(one: float, other: float) -> float:
    """Return the larger of two times, or of each two in arrays."""
    if is_many(one) or is_many(other):
        return np.maximum(one, other)  # type: ignore[no-any-return]
    return max(one, other)


def as_rows(numbers: Sequence[float], num: int) -> Floats:
    """Return each number, or array of `num`, as a row, shape (numbers, num)."""
    return np.array([np.broadcast_to(number, num) for number in numbers], float)


def split(value: _Value, num: int) -> list[_Value]:
    """Return what each of so many has of numbers: its own of arrays, of others the same.

    Args:
        value: a number, or numbers in tuples, mappings and dataclasses.
    """
    if is_many(value):
        return cast("list[_Value]", np.asarray(value).tolist())
    if isinstance(value, Mapping):
        return [cast("_Value", dict(zip(value, row, strict=True))) for row in _rows(value, num)]
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value)]
        rows = _rows({name: getattr(value, name) for name in names}, num)
        return [replace(value, **dict(zip(names, row, strict=True))) for row in rows]
    if isinstance(value, tuple):
        return [type(value)(*row) for row in _rows(dict(enumerate(value)), num)]
    return [value] * num


def _rows(values: Mapping[Any, Any], num: int) -> list[tuple[Any, ...]]:
    return [*zip(*(split(one, num) for one in values.values()), strict=True)] or [()] * num
