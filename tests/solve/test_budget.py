"""The peak against its limit, by brute force over tokens and over degrees."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.memory import MemoryBudget
from tests.solve.costs_by_hand import LinearCosts

DEGREES = range(1, 10)
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


@settings(max_examples=60, deadline=None)
@given(budget=budgets, strategy=st.sampled_from(STRATEGIES), tokens=st.integers(9, 60))
def test_nothing_takes_less_memory_than_the_least(
    budget: MemoryBudget, strategy: Strategy, tokens: int
) -> None:
    costs = layer_costs(
        workload=budget.workload, costs=LinearCosts(group_size=budget.workload.world_size)
    )
    bounds = Bounds(max_degree=DEGREES[-1])
    chooser = DegreeChooser(costs=costs, bounds=bounds, budget=budget, strategy=strategy)
    peaks = {
        degree: budget.peak(strategy=strategy, degree=degree, tokens=tokens).device_bytes
        for degree in DEGREES
        if degree > 1 or strategy == "none"
    }
    assert peaks[chooser.least(tokens)] == min(peaks.values())


@settings(max_examples=30, deadline=None)
@given(
    budget=budgets, strategy=st.sampled_from(STRATEGIES), degree=st.sampled_from(DEGREES),
    spare_bytes=st.integers(-2000, 20_000),
)  # fmt: skip
def test_the_most_tokens_fit_and_one_more_does_not(
    budget: MemoryBudget, strategy: Strategy, degree: int, spare_bytes: int
) -> None:
    planned = budget.peak(strategy=strategy, degree=degree).device_bytes
    limited = with_limit(budget, planned + spare_bytes)
    most = limited.most_tokens(strategy=strategy, degree=degree)
    assert (most >= budget.workload.tokens_per_rank) is (spare_bytes >= 0)
    assert not limited.fits(strategy=strategy, degree=degree, tokens=most + 1)
    assert most == 0 or limited.fits(strategy=strategy, degree=degree, tokens=most)
