"""Logarithms and powers of arrays: those of few numbers are those of each one."""

import math

import numpy as np
import pytest

from moetune.domain.arrays import FEW, exp_of, log_of


@pytest.mark.parametrize("num", [0, 1, FEW, FEW + 2])
def test_logarithms_and_powers_are_those_of_each_number(num: int) -> None:
    numbers = np.linspace(0.1, 7.0, num).reshape(-1, 1)
    for found, function in ((exp_of(numbers), math.exp), (log_of(numbers), math.log)):
        expected = [function(one) for one in numbers.ravel().tolist()]
        assert found.shape == numbers.shape
        assert found.ravel().tolist() == pytest.approx(expected, rel=1e-15, abs=1e-16)
        if num <= FEW:
            assert found.ravel().tolist() == expected
