"""Rooflines of measured products, against the non-negative least squares of scipy."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from moetune.domain.cost_keys import Shape
from moetune.fit.gemm import roofline_of, table_of, work_of
from moetune.fit.pool import Series

SIDES = st.sampled_from([64, 128, 256, 1024, 4096])
SHAPES = st.tuples(st.sampled_from([1, 4, 16]), SIDES, SIDES)
ROWS = st.lists(st.integers(3, 14), min_size=1, max_size=6, unique=True)


@given(
    st.dictionaries(SHAPES, ROWS, min_size=1, max_size=6),
    st.tuples(*(st.sampled_from([0.0, 0.1, 1.0]),) * 3),
    st.randoms(use_true_random=False),
)
def test_each_roofline_misses_no_more_than_that_of_scipy(
    measured: dict[Shape, list[int]], truth: tuple[float, ...], draw: Random
) -> None:
    start, compute, traffic = (factor + 1e-3 for factor in truth)

    def series(shape: Shape, octaves: list[int]) -> Series:
        rows = [float(2**octave) for octave in sorted(octaves)]
        macs, elements = work_of(np.array([shape], float), np.array(rows))
        exact = 20e-6 * start + macs[0] * compute / 40e9 + elements[0] * traffic / 5e9
        medians = tuple(float(one) * draw.uniform(0.7, 1.4) for one in exact)
        return Series(sizes=tuple(rows), times=tuple((one,) for one in medians), medians=medians)

    table = table_of({shape: series(shape, rows) for shape, rows in measured.items()}, 1e-6)
    everyone = np.ones((1, len(measured)), bool)
    others = ~np.eye(len(measured), dtype=bool)
    uses = np.vstack([everyone, others[: len(measured) * (len(measured) > 1)]])

    for use in uses:
        found = roofline_of(table, use)
        where = table.measured & use[:, None]
        work = np.stack([np.ones(where.sum()), table.macs[where], table.elements[where]], axis=1)
        features = work / table.seconds[where][:, None]
        scale = features.max(axis=0)
        least = nnls(features / scale, np.ones(len(features)))[1]
        assert min(found) >= 0
        assert np.linalg.norm(features @ np.array(found) - 1) == pytest.approx(least, abs=1e-6)
