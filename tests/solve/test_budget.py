"""The peak against its limit, by brute force over tokens and over every pair of degrees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import LayerShape, Phase, Workload
from moetune.solve.layer.budget import MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.too_large import too_large
from tests.solve.costs_by_hand import LinearCosts

DEGREES = range(1, 10)
PAIRS = [(one, other) for one in DEGREES for other in DEGREES]
LAYER = LayerShape(d_model=8, d_hidden=32, num_experts=8, top_k=2)
budgets = st.builds(
    lambda workload, grouped: MemoryBudget(
        workload=workload, limit_bytes=0,
        is_grouped=grouped and workload.dtype == "bfloat16",
    ),
    st.builds(
        Workload,
        layer=st.builds(
            LayerShape, d_model=st.sampled_from([8, 48]), d_hidden=st.sampled_from([8, 100]),
            num_experts=st.just(8), top_k=st.sampled_from([1, 2]),
            activation=st.sampled_from(["relu", "gelu", "swiglu"]),
        ),
        world_size=st.sampled_from([2, 4, 8]),
        tokens_per_rank=st.integers(9, 60),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        expert_parallel=st.sampled_from(["all_to_all", "all_to_all", "tensor"]),
    ),
    st.booleans(),
)  # fmt: skip


def with_limit(budget: MemoryBudget, limit_bytes: int) -> MemoryBudget:
    return MemoryBudget(
        workload=budget.workload, limit_bytes=limit_bytes,
        is_grouped=budget.is_grouped,
    )  # fmt: skip


def peaks_of(budget: MemoryBudget, strategy: Strategy, tokens: int) -> dict[tuple[int, int], int]:
    return {
        pair: budget.peak(strategy=strategy, degrees=pair, tokens=tokens).device_bytes
        for pair in PAIRS
    }


@settings(max_examples=60, deadline=None)
@given(
    budget=budgets, strategy=st.sampled_from(STRATEGIES), tokens=st.integers(9, 60),
    is_measured=st.booleans(),
)  # fmt: skip
def test_nothing_takes_less_memory_than_the_least(
    budget: MemoryBudget, strategy: Strategy, tokens: int, *, is_measured: bool
) -> None:
    costs = layer_costs(
        workload=budget.workload,
        costs=LinearCosts(group_size=budget.workload.world_size, is_measured=is_measured),
    )
    bounds = Bounds(max_degree=DEGREES[-1])
    chooser = DegreeChooser(costs=costs, bounds=bounds, budget=budget, strategy=strategy)
    peaks = {
        pair: peak for pair, peak in peaks_of(budget, strategy, tokens).items()
        if (pair[0] == pair[1] or not is_measured) and (max(pair) > 1 or strategy == "none")
    }  # fmt: skip
    assert peaks[chooser.least(tokens)] == min(peaks.values())


@settings(max_examples=30, deadline=None)
@given(
    budget=budgets, strategy=st.sampled_from(STRATEGIES), degrees=st.sampled_from(PAIRS),
    spare_bytes=st.integers(-2000, 20_000),
)  # fmt: skip
def test_the_most_tokens_fit_and_one_more_does_not(
    budget: MemoryBudget, strategy: Strategy, degrees: tuple[int, int], spare_bytes: int
) -> None:
    planned = budget.peak(strategy=strategy, degrees=degrees).device_bytes
    limited = with_limit(budget, planned + spare_bytes)
    most = limited.most_tokens(strategy=strategy, degrees=degrees)
    assert (most >= budget.workload.tokens_per_rank) is (spare_bytes >= 0)
    assert not limited.fits(strategy=strategy, degrees=degrees, tokens=most + 1)
    assert most == 0 or limited.fits(strategy=strategy, degrees=degrees, tokens=most)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_smallest_plan_of_an_error_is_that_of_all_pairs(strategy: Strategy, dtype: str) -> None:
    for tokens in (9, 24, 61, 4000):
        workload = Workload(layer=LAYER, world_size=4, tokens_per_rank=tokens, dtype=dtype)
        budget = MemoryBudget(workload=workload, limit_bytes=1)
        costs = layer_costs(workload=workload, costs=LinearCosts(group_size=4))
        chooser = DegreeChooser(costs=costs, bounds=Bounds(max_degree=DEGREES[-1]))
        error = too_large(budget, [strategy], chooser)
        assert isinstance(error, InfeasiblePlanError)
        forward, backward = (int(word) for word in error.what.split("(")[1].split()[:3:2])
        peaks = peaks_of(budget, strategy, tokens)
        assert peaks[forward, backward] == min(peaks.values())


def check_beside_a_pin(
    budget: MemoryBudget, pinned: int, place: int, beta: float, *, is_forward: bool
) -> None:
    """Compare the choice beside a pinned degree with all that fit."""
    workload = budget.workload
    line = LinearCost(alpha_seconds=1e-7, beta_seconds=beta)
    costs = layer_costs(
        workload=workload,
        costs=LinearCosts(
            transfer_cost=line,
            sum_cost=line,
            group_size=workload.world_size,
            gemm_cost=LinearCost(alpha_seconds=1e-7, beta_seconds=4e-12),
        ),
    )
    phase: Phase = "backward" if is_forward else "forward"
    pairs = {one: (pinned, one) if is_forward else (one, pinned) for one in DEGREES}
    peaks = {
        one: budget.peak(strategy="none", degrees=pair).device_bytes for one, pair in pairs.items()
    }
    limited = with_limit(budget, sorted(peaks.values())[place])
    bounds = Bounds(
        max_degree=DEGREES[-1], forward_degree=pinned if is_forward else None,
        backward_degree=None if is_forward else pinned,
    )  # fmt: skip
    chooser = DegreeChooser(costs=costs, bounds=bounds, budget=limited)
    tokens = workload.tokens_per_rank
    fitting = [one for one, peak in peaks.items() if peak <= limited.limit_bytes]
    least = min(chooser.time(phase, tokens, one).seconds for one in fitting)
    found = chooser.degrees(tokens)
    assert found is not None
    assert chooser.fits(tokens, found)
    chosen = found[1] if is_forward else found[0]
    assert chooser.time(phase, tokens, chosen).seconds == pytest.approx(least, rel=1e-9)


def test_beside_a_pinned_degree_memory_leaves_out_the_best_between_two_that_fit() -> None:
    layer = LayerShape(d_model=8, d_hidden=8, num_experts=8)
    workload = Workload(layer=layer, world_size=2, tokens_per_rank=9, dtype="bfloat16")
    for place in range(len(DEGREES)):
        budget = MemoryBudget(workload=workload, limit_bytes=0)
        check_beside_a_pin(budget, 1, place, 3e-8, is_forward=True)


@settings(max_examples=150, deadline=None)
@given(
    budget=budgets,
    pinned=st.sampled_from(DEGREES),
    place=st.integers(0, 8),
    is_forward=st.booleans(),
    beta=st.sampled_from([3e-10, 3e-8]),
)
def test_beside_a_pinned_degree_the_best_of_those_that_fit_is_chosen(
    budget: MemoryBudget, pinned: int, place: int, beta: float, *, is_forward: bool
) -> None:
    """Memory may leave out degrees between two that fit, where closed forms have their best."""
    check_beside_a_pin(budget, pinned, place, beta, is_forward=is_forward)
