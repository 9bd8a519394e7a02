"""Ranges of tokens partition the sizes, and each has its best degree."""

import itertools
from bisect import bisect_left
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.plan import Range
from moetune.solve.layer.choose import WORTH, DegreeChooser
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.plan import solve_ranges
from moetune.solve.layer.times import phase_time
from tests.solve.costs_by_hand import LinearCosts

TOKENS = 3000
LAYER = LayerShape(d_model=256, d_hidden=1024, num_experts=8, top_k=2)
WORKLOAD = Workload(layer=LAYER, world_size=4, tokens_per_rank=TOKENS, dtype="bfloat16")
DISTURBED = Interference(comm=CommSpeed(comp=0.7), comp=CompSpeed(comm=0.9))

lines = st.builds(
    LinearCosts,
    gemm_cost=st.builds(
        LinearCost, alpha_seconds=st.floats(1e-6, 1e-3), beta_seconds=st.floats(1e-14, 1e-11)
    ),
    transfer_cost=st.builds(
        LinearCost, alpha_seconds=st.floats(1e-6, 1e-2), beta_seconds=st.floats(1e-11, 1e-7)
    ),
)


def _chooser(
    costs: Costs, bounds: Bounds | None = None, limit_bytes: int | None = None
) -> DegreeChooser:
    return DegreeChooser(
        costs=layer_costs(workload=WORKLOAD, costs=costs),
        bounds=bounds or Bounds(),
        budget=None
        if limit_bytes is None
        else MemoryBudget(workload=WORKLOAD, limit_bytes=limit_bytes, is_grouped=False),
    )


def _peak_bytes(tokens: int, degree: int) -> int:
    workload = replace(WORKLOAD, tokens_per_rank=tokens)
    return peak_bytes(workload=workload, degree=degree, is_grouped=False).device_bytes


def _solve(chooser: DegreeChooser, tokens: int = TOKENS) -> tuple[Range, ...]:
    return solve_ranges(chooser, tokens, chooser.degree(tokens) or chooser.least(tokens))


def _loss(chooser: DegreeChooser, ranges: tuple[Range, ...], tokens: int) -> float:
    """Return by how much the range's step is slower than the best of all, tried one by one."""
    row = next(row for row in ranges if row[0] <= tokens <= row[1])
    around = chooser.costs.overhead(tokens=tokens).seconds.item()
    times = [
        sum(
            phase_time(
                costs=chooser.costs, phase=phase, tokens=tokens, degree=degree,
                order="dispatch_first",
            ).seconds
            for phase in PHASES
        )
        for degree in range(1, chooser.bounds.largest(tokens) + 1)
    ]  # fmt: skip
    return (around + times[row[2] - 1]) / (around + min(times)) - 1


def _assert_partition(ranges: tuple[Range, ...], tokens: int) -> None:
    assert ranges[0][0] == 1
    assert ranges[-1][1] >= max(2**20, 4 * tokens)
    for before, after in itertools.pairwise(ranges):
        assert before[0] <= before[1]
        assert after[0] == before[1] + 1
        assert before[2] != after[2]  # equal neighbours are one range
    assert all(forward == backward for _, _, forward, backward in ranges)


@settings(deadline=None, max_examples=15)
@given(lines, st.integers(1, 2_000_000))
def test_ranges_partition_the_tokens_and_hold_the_plans_degree(
    costs: LinearCosts, tokens: int
) -> None:
    chooser = _chooser(costs)
    ranges = _solve(chooser, tokens)
    _assert_partition(ranges, tokens)
    planned = next(row for row in ranges if row[0] <= tokens <= row[1])
    assert planned[2] == chooser.degree(tokens)


@settings(deadline=None, max_examples=15, derandomize=True)  # a bound for drawn costs, not all
@given(lines, st.lists(st.integers(1, 2**20), min_size=5, max_size=5))
def test_ranges_of_lines_lose_little_at_any_size(costs: LinearCosts, sizes: list[int]) -> None:
    """Degrees are those of a size at most √2 larger or smaller, the plan's own of half of it."""
    chooser = _chooser(costs)
    ranges = _solve(chooser)
    for size in (2**3 + 4, 2**7 + 53, 2**16 + 27_000):  # near the means of their spans
        assert _loss(chooser, ranges, size) <= 0.01
    assert max(_loss(chooser, ranges, size) for size in sizes) <= 0.12


@pytest.mark.thorough
@settings(deadline=None, max_examples=5, derandomize=True)
@given(
    lines, st.floats(0.6, 1.0), st.floats(1.0, 2.0), st.lists(st.integers(1, 2**20), min_size=20)
)
def test_ranges_of_measured_costs_lose_little_at_any_size(
    costs: LinearCosts, power: float, alone_factor: float, sizes: list[int]
) -> None:
    measured = replace(
        costs,
        has_points=True,
        power=power,
        alone_factor=alone_factor,
        interference=DISTURBED,
        rows_seconds={"gelu": 1e-10, "gelu_backward": 2e-10, "gather": 1e-10},
    )
    chooser = _chooser(measured)
    ranges = _solve(chooser)
    _assert_partition(ranges, TOKENS)
    assert max(_loss(chooser, ranges, size) for size in sizes) <= WORTH / (1 - WORTH) + 0.05


def test_the_best_degree_can_fall_as_the_batch_grows() -> None:
    # 2·β_a·y = T and r·t_e = r + 0.2·T forward, twice that backward, so that the phases take
    # max(T, T/r + r + 0.2·T) and max(T, T/r + 2·r + 0.4·T): at T = 18 three chunks are best, with
    # 18 and 19.2; at T = 1000 two are enough for the link.
    per_token = 2 * LAYER.d_model * LAYER.top_k * 2
    macs = LAYER.top_k * LAYER.d_model * LAYER.d_hidden
    costs = LinearCosts(
        transfer_cost=LinearCost(alpha_seconds=0.0, beta_seconds=1 / per_token),
        gemm_cost=LinearCost(alpha_seconds=0.5, beta_seconds=0.1 / macs),
    )
    chooser = _chooser(costs)
    assert [chooser.degree(size) for size in (18, 1000)] == [3, 2]
    forward = [row[2] for row in _solve(chooser)]
    assert forward != sorted(forward)
    assert forward[-1] == 2


def test_ranges_keep_a_pinned_degree_wherever_there_are_tokens_enough() -> None:
    ranges = _solve(_chooser(LinearCosts(), Bounds(forward_degree=4)))
    assert ranges == ((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (4, 2**20, 4, 4))


def _assert_ranges_fit(ranges: tuple[Range, ...], limit_bytes: int, largest: int) -> None:
    """Each range fits up to its last token, as long as any degree does."""
    for low, high, degree, _ in ranges:
        too_large = bisect_left(
            range(low, high + 1), limit_bytes + 1, key=lambda size: _peak_bytes(size, degree)
        )
        if low + too_large <= high:
            for num in range(1, largest + 1):
                assert _peak_bytes(low + too_large, num) > limit_bytes, (low + too_large, num)


@pytest.mark.parametrize("interference", [Interference(), DISTURBED])
@pytest.mark.parametrize("tokens_that_fit", [2000, 20_000])
def test_ranges_fit_up_to_their_last_token_as_long_as_any_degree_does(
    interference: Interference, tokens_that_fit: int
) -> None:
    limit = _peak_bytes(tokens_that_fit, 3)
    costs = LinearCosts(interference=interference)
    chooser = _chooser(costs, Bounds(max_degree=8), limit_bytes=limit)
    ranges = _solve(chooser)
    _assert_partition(ranges, TOKENS)
    _assert_ranges_fit(ranges, limit, 8)
    assert max(max(row[2:]) for row in ranges) > 1


MEASURED = LinearCosts(has_points=True, alone_factor=1.5, interference=DISTURBED)


@pytest.mark.parametrize("tokens_that_fit", [20_000, 500])
def test_measured_ranges_respect_the_bounds_and_the_memory(tokens_that_fit: int) -> None:
    limit = _peak_bytes(tokens_that_fit, 4)
    free = _chooser(MEASURED, Bounds(max_degree=6, min_chunk_tokens=50), limit_bytes=limit)
    _assert_ranges_fit(_solve(free), limit, 6)
    bounds = Bounds(max_degree=6, min_chunk_tokens=50, backward_degree=3)
    ranges = _solve(_chooser(MEASURED, bounds, limit_bytes=limit))
    assert [row[2:] for row in ranges] == [(1, 1), (2, 2), (3, 3)]
