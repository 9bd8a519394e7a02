"""Spreads of predictions that nobody measured, against truths that are known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.arrays import Floats
from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, RowsKey
from moetune.domain.costs import Costs, Refit, seconds_if_known
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    GemmForm,
    GemmPoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.fit.curve import curve_through
from moetune.fit.extrapolation import SPREAD_OF_FLIGHT
from moetune.fit.variants import resample_costs
from tests.fit.measured import fitted

MACHINE = Machine(
    kind="cpu", device="Lab CPU", num_devices=4, devices_per_node=4, memory_bytes=2**34
)
Truth = Callable[[float], float]
NUM_DRAWS = 200


def costs_from(
    points: dict[Point, float], *, noise: float = 0.01, seed: int = 0
) -> tuple[Costs, tuple[Refit, ...]]:
    """Nominal costs and draws of a profile with these points, measured with noise."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(point=point, seconds=tuple(seconds * np.exp(noise * rng.normal(size=9))))
        for point, seconds in points.items()
    ]
    made = fitted(samples, MACHINE)
    draws = resample_costs(made, num=NUM_DRAWS, seed=1, allow_modelled=True)
    return costs_of(made, allow_modelled=True), draws


def exchange(num_bytes: float, *, group_size: int = 2, in_flight: int = 1) -> CollectivePoint:
    return CollectivePoint(
        op="all_to_all", group_size=group_size, num_bytes=int(num_bytes), in_flight=in_flight
    )


def seconds_of(costs: Costs, num_bytes: float, *, group_size: int = 2, in_flight: int = 1) -> float:
    return costs.seconds(
        CollectiveKey("all_to_all", group_size, in_flight=in_flight), num_bytes
    ).seconds


def drawn_seconds(costs: Costs, num_bytes: float) -> Floats:
    return costs.seconds(CollectiveKey("all_to_all", 2), np.array(num_bytes)).seconds


def affine(rng: np.random.Generator) -> Truth:
    """α + β·size, which cross somewhere near the measured sizes."""
    alpha = 1e-4 * math.exp(rng.normal())
    beta = 1e-9 * math.exp(rng.normal())
    return lambda size: alpha + beta * size


def in_segments(rng: np.random.Generator) -> Truth:
    """The same whose rate changes by about 15 %, and whose start-up by a tenth, an octave."""
    alpha, beta = 1e-4 * math.exp(rng.normal()), 1e-9 * math.exp(rng.normal())
    edges = 2.0 ** np.arange(6, 28)
    rates = beta * np.exp(np.cumsum(0.15 * rng.normal(size=edges.size)))
    starts = alpha * np.exp(np.cumsum(0.1 * np.abs(rng.normal(size=edges.size))))
    seconds = starts + np.cumsum(rates * np.diff(edges, prepend=0.0))
    return lambda size: float(np.interp(size, edges, seconds))


def coverage(family: Callable[[np.random.Generator], Truth]) -> tuple[float, float]:
    """Return the share of times beyond the range that lie in the 90 % interval.

    And that would, if the error there were that between the points.
    """
    rng = np.random.default_rng(5)
    inside, naive = [], []
    for trial in range(60):
        truth = family(rng)
        first, count = 2.0 ** rng.integers(12, 17), int(rng.integers(4, 6))
        sizes = [first * 4**at for at in range(count)]
        exact, draws = costs_from({exchange(size): truth(size) for size in sizes}, seed=trial)
        middle = seconds_of(exact, sizes[0])
        together = draws[0].together(draws)
        factors = drawn_seconds(together, sizes[0]) / middle
        for octaves in (1, 2, 4, 6):
            for size in (sizes[0] / 2**octaves, sizes[-1] * 2**octaves):
                drawn = drawn_seconds(together, size)
                low, high = np.quantile(drawn, (0.05, 0.95))
                inside.append(low <= truth(size) <= high)
                low, high = np.quantile(factors, (0.05, 0.95)) * seconds_of(exact, size)
                naive.append(low <= truth(size) <= high)
    return float(np.mean(inside)), float(np.mean(naive))


@pytest.mark.unmeasured
@pytest.mark.parametrize("family", [affine, in_segments])
def test_the_interval_beyond_the_measured_sizes_covers_the_truth(
    family: Callable[[np.random.Generator], Truth],
) -> None:
    covered, naive = coverage(family)
    assert covered >= 0.84
    assert naive < covered - 0.15


@given(
    seconds=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=4),
    deviates=st.tuples(st.floats(-4, 4), st.floats(-4, 4)),
    octaves=st.floats(0.01, 30),
)
def test_no_draw_leaves_what_is_possible(
    seconds: list[float], deviates: tuple[float, float], octaves: float
) -> None:
    """Larger takes no less time, and smaller no less than its share."""
    sizes = [2.0 ** (10 + 2 * at) for at in range(len(seconds))]
    plain = curve_through(sizes=sizes, seconds=seconds)
    curve = curve_through(sizes=sizes, seconds=seconds, deviates=np.reshape(deviates, (2, 1, 1)))
    above, below = curve.predict(sizes[-1] * 2**octaves), curve.predict(sizes[0] / 2**octaves)
    nothing = 1 - 1e-9
    assert above.seconds >= plain.seconds[0, -1] * nothing
    assert plain.seconds[0, 0] * 2**-octaves * nothing <= below.seconds
    assert below.seconds * nothing <= plain.seconds[0, 0]
    for size in sizes:
        assert curve.predict(size) == plain.predict(size)


def spread_between(first: list[float], second: list[float]) -> float:
    return float(np.std(np.log(np.array(first) / np.array(second))))


def test_a_single_exchange_in_flight_stands_in_for_several_with_a_further_error() -> None:
    exact, draws = costs_from({exchange(2**at): 1e-9 * 2**at for at in (14, 16, 18)})
    alone = [seconds_of(draw, 2**16) for draw in draws]
    several = [seconds_of(draw, 2**16, in_flight=4) for draw in draws]
    many = [seconds_of(draw, 2**16, in_flight=16) for draw in draws]
    assert several == many
    assert spread_between(several, alone) == pytest.approx(SPREAD_OF_FLIGHT, rel=0.2)
    known = exact.seconds(CollectiveKey("all_to_all", 2), 2**16)
    other = exact.seconds(CollectiveKey("all_to_all", 2, in_flight=4), 2**16)
    assert known.doubts == ()
    (doubt,) = other.doubts
    assert doubt.operation == "all_to_all of 2 ranks, 4 in flight"
    assert doubt.stand_in == "all_to_all of 2 ranks"
    assert (doubt.low, doubt.high) == (None, None)


def test_another_group_stands_in_with_an_error_for_each_octave() -> None:
    points: dict[Point, float] = {exchange(2**at): 1e-9 * 2**at for at in (12, 14, 16, 18)}
    exact, draws = costs_from(points)
    plain = [seconds_of(draw, 2**16) for draw in draws]
    spreads = []
    for group_size in (3, 4):
        other = [seconds_of(draw, 2**15, group_size=group_size) for draw in draws]
        spreads.append(spread_between(other, plain))
    assert spreads == pytest.approx([0.3, 0.3], rel=0.2)
    estimate = exact.seconds(CollectiveKey("all_to_all", 4), 2**15)
    assert estimate.trust == "modelled"
    assert [doubt.stand_in for doubt in estimate.doubts] == ["all_to_all of 2 ranks"]


def products(forms: tuple[GemmForm, ...] = ("forward",)) -> dict[Point, float]:
    return {
        GemmPoint(dtype="float32", product=form, rows=rows, d_in=d_in, d_out=512): 1e-10
        * rows
        * d_in
        for form in forms
        for rows in (8, 32, 128)
        for d_in in (256, 512)
    }


def test_a_doubt_names_the_operation_the_size_and_what_was_measured() -> None:
    points: dict[Point, float] = {
        RowsPoint(op="gelu", dtype="float32", rows=rows, width=512): 1e-8 * rows
        for rows in (8, 128)
    }
    points |= {
        AttentionPoint(
            dtype="float32", num_sequences=count, length=64, num_heads=2, head_dim=8
        ): 1e-5 * count
        for count in (1, 4)
    }
    exact, draws = costs_from(points | products())
    for rows, expected in ((4, 1), (8, 0), (64, 0), (256, 1)):
        estimate = seconds_if_known(exact, RowsKey("gelu", "float32"), rows * 512)
        assert estimate is not None
        assert len(estimate.doubts) == expected
        for doubt in estimate.doubts:
            assert (doubt.operation, doubt.unit) == ("gelu in float32", "elements")
            assert (doubt.size, doubt.low, doubt.high) == (512 * rows, 512 * 8, 512 * 128)
    longer = seconds_if_known(exact, AttentionKey("float32", 128, 2, 8), 1)
    assert longer is not None
    assert longer.doubts[0].stand_in == "attention of 2 heads over 64 tokens in float32"
    key = RowsKey("gelu", "float32")
    assert draws[0].seconds(key, 4 * 512).doubts == exact.seconds(key, 4 * 512).doubts != ()
