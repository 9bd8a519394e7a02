"""Ranges of tokens partition the sizes, and each has its best degree."""

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moetune.domain.arrays import as_number
from moetune.domain.constraints import Bounds
from moetune.domain.cost_keys import CostKey
from moetune.domain.costs import Costs, Estimate, LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Phase, Workload
from moetune.domain.plan import Range
from moetune.solve.layer.budget import MemoryBudget
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.fewest_ranges import fewest_runs
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.ranges import solve_ranges
from moetune.solve.layer.times import phase_time
from tests.solve.costs_by_hand import LinearCosts

TOKENS = 3000
LAYER = LayerShape(d_model=256, d_hidden=1024, num_experts=8, top_k=2)
WORKLOAD = Workload(layer=LAYER, world_size=4, tokens_per_rank=TOKENS, dtype="bfloat16")
DISTURBED = Interference(comm=CommSpeed(comp=0.7), comp=CompSpeed(comm=0.9))

Degrees = tuple[int, int]
NEAR = 0.03  # between solved sizes, a tenth apart, a range may begin a little early or late

lines = st.builds(
    LinearCosts,
    gemm_cost=st.builds(
        LinearCost,
        alpha_seconds=st.floats(1e-6, 1e-3),
        beta_seconds=st.floats(1e-14, 1e-11),
    ),
    transfer_cost=st.builds(
        LinearCost,
        alpha_seconds=st.floats(1e-6, 1e-2),
        beta_seconds=st.floats(1e-11, 1e-7),
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
        else MemoryBudget(workload=WORKLOAD, limit_bytes=limit_bytes),
    )


def _peak_bytes(tokens: int, forward: int, backward: int) -> int:
    return peak_bytes(
        workload=replace(WORKLOAD, tokens_per_rank=tokens), forward_degree=forward,
        backward_degree=backward,
    ).device_bytes  # fmt: skip


def _solve(chooser: DegreeChooser, tokens: int = TOKENS) -> tuple[Range, ...]:
    forward, backward = (chooser.rank(phase, tokens)[0].degree for phase in PHASES)
    return solve_ranges(
        chooser=chooser, tokens=tokens, forward_degree=forward, backward_degree=backward
    )


def _regret(chooser: DegreeChooser, phase: Phase, tokens: int, degree: int) -> float:
    """Return by how much the degree is slower than the best of all, tried one by one."""
    times = [
        phase_time(
            costs=chooser.costs, phase=phase, tokens=tokens, degree=one, order="dispatch_first"
        ).seconds
        for one in range(1, chooser.bounds.largest(tokens) + 1)
    ]
    return times[degree - 1] / min(times) - 1


def _worst_regret(chooser: DegreeChooser, ranges: tuple[Range, ...], tokens: int) -> float:
    row = next(row for row in ranges if row[0] <= tokens <= row[1])
    return max(
        _regret(chooser, phase, tokens, degree)
        for phase, degree in zip(PHASES, row[2:], strict=True)
    )


def _assert_chunks_where_they_pay(
    chooser: DegreeChooser, ranges: tuple[Range, ...], tokens: int
) -> None:
    """Near the best, tried one by one, where that saves enough; else one chunk."""
    row = next(row for row in ranges if row[0] <= tokens <= row[1])
    around = chooser.costs.overhead(tokens=tokens).seconds
    steps = [
        around + sum(chooser.time(phase, tokens, one).seconds for phase in PHASES)
        for one in chooser.allowed("forward", tokens)
    ]
    assert row[2] == row[3]
    chosen, best, one_chunk = steps[row[2] - 1], min(steps), steps[0]
    saved = 1 - best / one_chunk
    if saved > WORTH + NEAR:
        assert chosen / best - 1 <= NOISE + 5e-3, tokens
    elif saved < WORTH - NEAR:
        assert row[2:] == (1, 1), tokens


def _assert_partition(ranges: tuple[Range, ...], tokens: int) -> None:
    assert ranges[0][0] == 1
    assert ranges[-1][1] >= max(2**20, 4 * tokens)
    for before, after in itertools.pairwise(ranges):
        assert before[0] <= before[1]
        assert after[0] == before[1] + 1
        assert before[2:] != after[2:]  # equal neighbours are one range


@settings(deadline=None, max_examples=15)
@given(lines, st.integers(1, 2_000_000))
def test_ranges_partition_the_tokens_and_hold_the_plans_own_degrees(
    costs: LinearCosts, tokens: int
) -> None:
    chooser = _chooser(costs)
    ranges = _solve(chooser, tokens)
    _assert_partition(ranges, tokens)
    own = next(row for row in ranges if row[0] <= tokens <= row[1])
    assert own[2:] == tuple(chooser.rank(phase, tokens)[0].degree for phase in PHASES)


@settings(deadline=None, max_examples=15)
@given(lines, st.lists(st.integers(1, 2**20), min_size=5, max_size=5))
def test_ranges_of_lines_hold_the_best_degree_at_any_size(
    costs: LinearCosts, sizes: list[int]
) -> None:
    chooser = _chooser(costs)
    ranges = _solve(chooser)
    samples = [*range(1, 17), *(round(16 * 2 ** (step / 8)) for step in range(0, 128, 9))]
    for tokens in samples:
        assert _worst_regret(chooser, ranges, tokens) <= 1e-9
    # Between samples a degree that is best over less than a tenth of T may be passed over.
    assert max(_worst_regret(chooser, ranges, tokens) for tokens in sizes) <= 1e-3


@settings(deadline=None, max_examples=5)
@given(
    lines, st.floats(0.6, 1.0), st.floats(1.0, 2.0), st.lists(st.integers(1, 2**20), min_size=20)
)
def test_ranges_of_measured_costs_are_near_the_best_where_chunks_pay(
    costs: LinearCosts, power: float, alone_factor: float, sizes: list[int]
) -> None:
    measured = replace(
        costs,
        is_measured=True,
        power=power,
        alone_factor=alone_factor,
        interference=DISTURBED,
        rows_seconds={"gelu": 1e-10, "gelu_backward": 2e-10, "gather": 1e-10},
    )
    chooser = _chooser(measured)
    ranges = _solve(chooser)
    _assert_partition(ranges, TOKENS)
    for tokens in sizes:
        _assert_chunks_where_they_pay(chooser, ranges, tokens)


def test_the_best_degree_can_fall_as_the_batch_grows() -> None:
    # 2·β_a·y = T and r·t_e = r + 0.45·T per phase, so that T(r) = max(T, T/r + r + 0.45·T):
    # 18 from three chunks on at T = 18; at T = 1000 two chunks are enough for the link.
    per_token = 2 * LAYER.d_model * LAYER.top_k * 2
    macs = LAYER.top_k * LAYER.d_model * LAYER.d_hidden
    costs = LinearCosts(
        transfer_cost=LinearCost(alpha_seconds=0.0, beta_seconds=1 / per_token),
        gemm_cost=LinearCost(alpha_seconds=0.5, beta_seconds=0.225 / macs),
    )
    chooser = _chooser(costs)
    assert chooser.degrees(18)[0] == 3
    assert chooser.degrees(1000)[0] == 2
    forward = [row[2] for row in _solve(chooser)]
    assert forward != sorted(forward)
    assert forward[-1] == 2


def test_ranges_keep_a_pinned_degree_wherever_there_are_tokens_enough() -> None:
    ranges = _solve(_chooser(LinearCosts(), Bounds(forward_degree=4, backward_degree=4)))
    assert ranges[:4] == ((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (4, 2**20, 4, 4))


def test_ranges_respect_the_largest_degree_and_the_smallest_chunk() -> None:
    slow = LinearCost(alpha_seconds=1e-6, beta_seconds=1e-8)
    chooser = _chooser(LinearCosts(transfer_cost=slow), Bounds(max_degree=5, min_chunk_tokens=100))
    ranges = _solve(chooser)
    assert max(max(row[2:]) for row in ranges) <= 5
    for low, high, forward, backward in ranges:
        assert max(forward, backward) * 100 <= low or max(forward, backward) == 1, (low, high)
    assert max(max(row[2:]) for row in ranges) > 1


def _assert_ranges_fit(ranges: tuple[Range, ...], limit_bytes: int, largest: int) -> None:
    """Each range fits up to its last token, as long as as many chunks in both phases do."""
    for low, high, forward, backward in ranges:
        too_large = bisect_left(
            range(low, high + 1),
            limit_bytes + 1,
            key=lambda size: _peak_bytes(size, forward, backward),
        )
        if low + too_large <= high:
            for one in range(1, largest + 1):
                assert _peak_bytes(low + too_large, one, one) > limit_bytes, (low + too_large, one)


@pytest.mark.parametrize("interference", [Interference(), DISTURBED])
@pytest.mark.parametrize("tokens_that_fit", [2000, 20_000])
def test_ranges_fit_up_to_their_last_token_as_long_as_any_degree_does(
    interference: Interference, tokens_that_fit: int
) -> None:
    limit = _peak_bytes(tokens_that_fit, 3, 2)
    costs = LinearCosts(interference=interference)
    chooser = _chooser(costs, Bounds(max_degree=8), limit_bytes=limit)
    ranges = _solve(chooser)
    _assert_partition(ranges, TOKENS)
    _assert_ranges_fit(ranges, limit, 8)
    assert max(max(row[2:]) for row in ranges) > 1


def test_ranges_on_one_rank_are_one_range_of_one_chunk() -> None:
    workload = Workload(layer=LAYER, world_size=1, tokens_per_rank=TOKENS, dtype="bfloat16")
    costs = layer_costs(workload=workload, costs=LinearCosts())
    ranges = _solve(DegreeChooser(costs=costs, bounds=Bounds()))
    assert ranges == ((1, 2**20, 1, 1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyCosts(LinearCosts):
    """Curves that bend and ripple, as those through noisy medians do."""

    ripple: float

    def seconds(self, key: CostKey, size: float) -> Estimate:
        return LinearCosts.seconds(self, key, size).scaled(self._noise(size))

    def _noise(self, size: float) -> float:
        waves = np.log(np.asarray(size, float)) / math.log(16)
        return as_number(1 + self.ripple * np.sin(2 * math.pi * waves))


NOISY = NoisyCosts(is_measured=True, alone_factor=1.5, ripple=0.1, interference=DISTURBED)


@pytest.mark.unmeasured
@pytest.mark.parametrize("ripple", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("transfer_alpha", [1e-5, 2e-4])
def test_ranges_of_noisy_costs_are_near_the_best_where_chunks_pay_between_solved_sizes(
    ripple: float, transfer_alpha: float
) -> None:
    transfer = LinearCost(alpha_seconds=transfer_alpha, beta_seconds=3e-10)
    chooser = _chooser(replace(NOISY, ripple=ripple, transfer_cost=transfer))
    ranges = _solve(chooser)
    _assert_partition(ranges, TOKENS)
    sizes = [round(2 ** (step / 3.3)) for step in range(66)]
    for tokens in sizes:
        _assert_chunks_where_they_pay(chooser, ranges, tokens)


def test_near_ties_make_few_ranges_and_the_plans_own_tokens_keep_their_best_degrees() -> None:
    chooser = _chooser(NOISY)
    best = tuple(chooser.rank(phase, TOKENS)[0].degree for phase in PHASES)
    ranges = _solve(chooser)
    own = next(row for row in ranges if row[0] <= TOKENS <= row[1])
    assert own[2:] == best
    sizes = [round(16 * 2 ** (step / 8)) for step in range(128)]
    exact = [chooser.degrees(size) for size in sizes]
    changes = sum(before != after for before, after in itertools.pairwise(exact))
    assert changes > len(ranges)
    assert len(ranges) < 20


def test_no_table_has_fewer_runs_and_their_degrees_are_the_smallest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_sizes, num_degrees = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        tables = rng.random((2, num_sizes, num_degrees)) < 0.6
        tables[:, :, rng.integers(num_degrees)] |= ~tables.any(axis=2)

        def smallest(first: int, end: int, tables: NDArray[np.bool_] = tables) -> Degrees | None:
            forward, backward = (phase[first:end].all(axis=0).tolist() for phase in tables)
            if not (any(forward) and any(backward)):
                return None
            return forward.index(True) + 1, backward.index(True) + 1

        fewest = [0]
        for end in range(1, num_sizes + 1):
            fewest.append(1 + min(fewest[at] for at in range(end) if smallest(at, end)))
        good = [
            lambda at, degree, table=table: degree <= len(table[at]) and table[at][degree - 1]
            for table in tables.tolist()
        ]
        firsts, chosen = fewest_runs(good, num_sizes, 8)
        assert len(firsts) == fewest[-1]
        for first, end, degrees in zip(firsts, [*firsts[1:], num_sizes], chosen, strict=True):
            assert degrees == smallest(first, end)


@pytest.mark.parametrize("tokens_that_fit", [20_000, 500])
def test_measured_ranges_respect_the_bounds_and_the_memory(tokens_that_fit: int) -> None:
    limit = _peak_bytes(tokens_that_fit, 4, 4)
    free = _chooser(NOISY, Bounds(max_degree=6, min_chunk_tokens=50), limit_bytes=limit)
    _assert_ranges_fit(_solve(free), limit, 6)
    bounds = Bounds(max_degree=6, min_chunk_tokens=50, backward_degree=3)
    chooser = _chooser(NOISY, bounds, limit_bytes=limit)
    ranges = _solve(chooser)
    for low, high, forward, backward in ranges:
        for tokens in (low, high):
            assert forward in chooser.allowed("forward", tokens), (low, high)
            assert backward in chooser.allowed("backward", tokens), (low, high)
    assert ranges[-1] == (ranges[-1][0], 2**20, 3, 3)
    assert ranges[-1][0] <= 20_001


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_pinned_degree_is_kept_at_every_size_that_has_as_many_tokens(
    *, is_measured: bool
) -> None:
    chooser = _chooser(LinearCosts(is_measured=is_measured), Bounds(forward_degree=50))
    ranges = _solve(chooser)

    def forward(tokens: int) -> int:
        return next(row[2] for row in ranges if row[0] <= tokens <= row[1])

    assert [forward(tokens) for tokens in (1, 7, 16)] == [1, 7, 16]
    assert {forward(tokens) for tokens in (64, 100, 3000, 2**20)} == {50}
