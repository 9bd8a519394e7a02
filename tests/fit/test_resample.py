"""Costs drawn from what noise and fits leave open."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.costs import Costs
from moetune.domain.interference import CommSpeed, Interference
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    GemmPoint,
    InterferencePoint,
    RowsPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.fit.curve import SPACING_SHARE
from moetune.fit.variants import resample_costs
from tests.fit.measured import fitted, line_of

MACHINE = Machine(
    kind="cpu", device="Lab CPU", num_devices=2, devices_per_node=2, memory_bytes=2**34
)
SIZES = tuple(2**at for at in range(10, 26))
PUBLISHED = Profile(
    name="paper",
    provenance="published",
    machine=MACHINE,
    gemm=(GemmLine(dtype="float32", alpha_seconds=6e-5, beta_seconds_per_mac=4e-14),),
    collective=(
        CollectiveLine(
            op="all_to_all", group_size=2, alpha_seconds=1e-4, beta_seconds_per_byte=3e-10
        ),
    ),
)


def profile(*, noise: float, bumps: float = 0.0) -> Profile:
    """A profile of straight power laws with the blocks' noise, and bumps no noise explains."""
    rng = np.random.default_rng(0)

    def times(seconds: float) -> tuple[float, ...]:
        return tuple((seconds * np.exp(noise * rng.normal(size=25))).tolist())

    samples = [
        *(
            Sample(
                point=CollectivePoint(op="all_to_all", group_size=2, num_bytes=size),
                seconds=times(1e-9 * size * (1 + bumps * (-1) ** at)),
            )
            for at, size in enumerate(SIZES)
        ),
        *(
            Sample(
                point=GemmPoint(dtype="float32", rows=rows, d_in=d_in, d_out=512),
                seconds=times(1e-10 * rows * d_in),
            )
            for rows in (8, 32, 128, 512)
            for d_in in (256, 512, 1024)
        ),
        *(
            Sample(
                point=AttentionPoint(
                    dtype="float32", num_sequences=count, length=64, num_heads=2, head_dim=8
                ),
                seconds=times(1e-5 * count),
            )
            for count in (1, 4, 16)
        ),
        *(
            Sample(
                point=RowsPoint(op="gelu", dtype="float32", rows=rows, width=512),
                seconds=times(1e-8 * rows),
            )
            for rows in (8, 32, 128, 512)
        ),
    ]
    return fitted(samples, MACHINE)


def all_to_all(
    costs: Sequence[Costs], num_bytes: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(
        [draw.seconds(CollectiveKey("all_to_all", 2), num_bytes).seconds for draw in costs]
    )


def gemm(costs: Costs, *, d_in: int, rows: float = 100) -> float:
    return costs.seconds(GemmKey("float32", "forward", 1, d_in, 512), rows).seconds


def test_draws_lie_around_the_costs_with_the_noise_of_a_median() -> None:
    made = profile(noise=0.05)
    exact = costs_of(made)
    drawn = resample_costs(made, num=200, seed=1, allow_modelled=False)
    error = made.collective[0].error
    assert error is not None
    for size in (2**12, 3 * 2**14, 2**20):
        ratio = all_to_all(drawn, size) / all_to_all([exact], size)
        assert np.median(ratio) == pytest.approx(1, abs=0.03)
        assert 0.5 * error.median < np.median(np.abs(ratio - 1)) < 3 * error.median / SPACING_SHARE


def test_systematic_error_moves_a_whole_curve_together() -> None:
    made = profile(noise=0.005, bumps=0.05)
    exact = costs_of(made)
    drawn = resample_costs(made, num=200, seed=1, allow_modelled=False)
    error = made.collective[0].error
    assert error is not None
    small = all_to_all(drawn, 2**12) / all_to_all([exact], 2**12)
    large = all_to_all(drawn, 2**22) / all_to_all([exact], 2**22)
    assert np.corrcoef(small, large)[0, 1] > 0.95
    assert np.median(np.abs(small - 1)) == pytest.approx(error.median, rel=0.25)
    assert error.median > 0.08 * SPACING_SHARE


def test_lines_without_samples_are_drawn_with_the_assumed_error() -> None:
    drawn = resample_costs(PUBLISHED, num=400, seed=3, allow_modelled=False)
    lines = [line_of(draw, CollectiveKey("all_to_all", 2)) for draw in drawn]
    products = [line_of(draw, GemmKey("float32")) for draw in drawn]
    for fits, truth in ((lines, (1e-4, 3e-10)), (products, (6e-5, 4e-14))):
        pairs = np.array([(line.alpha_seconds, line.beta_seconds) for line in fits])
        assert pairs.shape == (400, 2)
        off = np.abs(pairs / truth - 1)
        assert np.median(off, axis=0) == pytest.approx([0.05, 0.05], abs=0.012)
        assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.15
        assert (pairs > 0).all()


def test_draws_depend_on_the_seed_and_not_on_the_order_of_questions() -> None:
    made = profile(noise=0.05)
    first, second = (resample_costs(made, num=5, seed=7, allow_modelled=False) for _ in range(2))
    forward = [(all_to_all([draw], 5000)[0], gemm(draw, d_in=300)) for draw in first]
    backward = [(gemm(draw, d_in=300), all_to_all([draw], 5000)[0]) for draw in reversed(second)]
    assert forward == [(comm, product) for product, comm in reversed(backward)]
    other = resample_costs(made, num=5, seed=8, allow_modelled=False)
    assert (all_to_all(other, 5000) != all_to_all(first, 5000)).all()


def disturbed(alone: tuple[float, ...], overlapped: tuple[float, ...]) -> Profile:
    samples = [
        Sample(point=InterferencePoint(victim="comm"), seconds=alone),
        Sample(point=InterferencePoint(victim="comm", others=("comp",)), seconds=overlapped),
    ]
    return fitted(samples, MACHINE)


def test_interference_is_drawn_from_its_raw_times() -> None:
    made = disturbed((1.0, 1.1, 0.9), (2.0, 2.2, 1.8))
    speeds = {
        draw.speeds["comm", "comp"].item()
        for draw in resample_costs(made, num=100, seed=0, allow_modelled=False)
    }
    assert min(speeds) == pytest.approx(0.9 / 2.2)
    assert max(speeds) == pytest.approx(1.1 / 1.8)
    assert len(speeds) > 3


def test_interference_that_somebody_set_is_left_as_it_is() -> None:
    made = disturbed((1.0, 1.1, 0.9), (2.0, 2.2, 1.8))
    edited = replace(made, interference=Interference(comm=CommSpeed(comp=0.7)))
    drawn = resample_costs(edited, num=5, seed=0, allow_modelled=False)
    assert {draw.speeds["comm", "comp"].item() for draw in drawn} == {0.7}
