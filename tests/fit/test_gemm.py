"""Products of shapes that were measured and of shapes that were not."""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from moetune.domain.cost_keys import Shape
from moetune.fit.gemm import Surface, roofline_of, table_of, work_of
from moetune.fit.pool import Series

ROWS = tuple(float(2**at) for at in range(3, 13))
SHAPES = tuple(
    (num_experts, d_in, d_out)
    for num_experts in (1, 4)
    for d_in, d_out in ((512, 2048), (2048, 512), (1024, 4096), (4096, 1024))
)
Truth = Callable[[Shape, float], float]


def saturating(shape: Shape, rows: float) -> float:
    """A processor whose use of its peak grows with every side, and that reads weights."""
    num_experts, d_in, d_out = shape
    use = (rows / (rows + 24)) * (d_in / (d_in + 200)) * (d_out / (d_out + 150))
    compute = num_experts * rows * d_in * d_out / (40e9 * use)
    return 3e-6 * num_experts + compute + 4 * num_experts * d_in * d_out / 10e9


def cliff(shape: Shape, rows: float) -> float:
    """A processor that wastes most of itself on skinny products."""
    num_experts, d_in, d_out = shape
    use = min(1.0, math.pow(rows / 48, 1.5)) * math.sqrt(min(1.0, d_in / 1024))
    return 10e-6 + num_experts * rows * d_in * d_out / (100e12 * use)


def surface(truth: Truth, shapes: tuple[Shape, ...] = SHAPES) -> Surface:
    def series(shape: Shape) -> Series:
        medians = tuple(truth(shape, rows) for rows in ROWS)
        return Series(sizes=ROWS, times=tuple((median,) for median in medians), medians=medians)

    return Surface(
        shapes={shape: series(shape) for shape in sorted(shapes)}, family="gemm", alpha_seconds=1e-6
    )


def test_an_additive_roofline_is_recovered_exactly_wherever_it_is_asked() -> None:
    def roofline(shape: Shape, rows: float) -> float:
        num_experts, d_in, d_out = shape
        moved = num_experts * (rows * (d_in + d_out) + d_in * d_out)
        return 5e-6 + math.prod(shape) * rows * 1e-13 + moved * 1e-11

    made = surface(roofline)

    assert max(made.shape_errors()) < 1e-6
    for shape in ((16, 128, 128), (2, 768, 3072)):
        for rows in ROWS:
            seconds = made.blend(shape).predict(rows).seconds
            assert seconds == pytest.approx(roofline(shape, rows), rel=1e-6)


@given(
    st.tuples(st.integers(1, 64), st.integers(16, 2**15), st.integers(16, 2**15)),
    st.lists(st.floats(0, 2**16), min_size=2, max_size=10),
)
def test_blended_times_never_fall_with_rows_and_never_beat_the_best_rate_seen(
    shape: Shape, rows: list[float]
) -> None:
    made = surface(cliff)
    best = max(math.prod(seen) * at / cliff(seen, at) for seen in SHAPES for at in ROWS)
    curve = made.blend(shape)
    seconds = [curve.predict(num).seconds for num in sorted(rows)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds))
    for num, time in zip(sorted(rows), seconds, strict=True):
        if num >= ROWS[0]:
            assert math.prod(shape) * num / time <= best * (1 + 1e-9)


@pytest.mark.parametrize("truth", [saturating, cliff])
def test_a_left_out_shape_is_predicted_from_the_others_alone(truth: Truth) -> None:
    expected = []
    for shape in sorted(SHAPES):
        others = surface(truth, tuple(seen for seen in SHAPES if seen != shape)).blend(shape)
        expected += [abs(others.predict(rows).seconds / truth(shape, rows) - 1) for rows in ROWS]
    assert surface(truth).shape_errors() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_one_shape_alone_carries_a_blend_with_a_large_error() -> None:
    made = surface(saturating, ((1, 512, 2048),))
    curve = made.blend((1, 512, 1024))
    assert made.shape_errors() == []
    assert curve.relative_error == 0.30
    assert curve.predict(512).seconds < saturating((1, 512, 2048), 512)


SOME_SIDES = st.sampled_from([64, 128, 256, 1024, 4096])
SOME_SHAPES = st.tuples(st.sampled_from([1, 4, 16]), SOME_SIDES, SOME_SIDES)
SOME_ROWS = st.lists(st.integers(3, 14), min_size=1, max_size=6, unique=True)


@given(
    st.dictionaries(SOME_SHAPES, SOME_ROWS, min_size=1, max_size=6),
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
        medians = tuple(float(time) * draw.uniform(0.7, 1.4) for time in exact)
        return Series(sizes=tuple(rows), times=tuple((time,) for time in medians), medians=medians)

    table = table_of({shape: series(shape, rows) for shape, rows in measured.items()}, 1e-6)
    everyone = np.ones((1, len(measured)), bool)
    others = ~np.eye(len(measured), dtype=bool)
    uses = np.vstack([everyone, others[: len(measured) * (len(measured) > 1)]])

    for use in uses:
        parts = roofline_of(table, use)
        where = table.measured & use[:, None]
        work = np.stack([np.ones(where.sum()), table.macs[where], table.elements[where]], axis=1)
        features = work / table.seconds[where][:, None]
        scale = features.max(axis=0)
        least = nnls(features / scale, np.ones(len(features)))[1]
        assert min(parts) >= 0
        assert np.linalg.norm(features @ np.array(parts) - 1) == pytest.approx(least, abs=1e-6)
