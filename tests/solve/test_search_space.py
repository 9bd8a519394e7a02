"""What an online search may try: within the pins, the gap and, to the byte, the memory."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision, Plan
from moetune.domain.terms import LayerTerms, PhaseTerms, StrategyTerms
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.online import REACH, Space, search_space
from moetune.solve.layer.peak import peak_bytes
from tests.runtime.plans import small_plan
from tests.solve.costs_by_hand import plan_inputs, solution

WORKLOAD = Workload(
    layer=LayerShape(d_model=64, d_hidden=256, num_experts=8), world_size=4, tokens_per_rank=512
)
SEED = Decision(forward_degree=2, backward_degree=2)


def bytes_of(decision: Decision, workload: Workload = WORKLOAD) -> int:
    return peak_bytes(
        workload=workload,
        degree=decision.degree,
        strategy=decision.strategy,
        is_grouped=workload.dtype == "bfloat16",
    ).device_bytes


def space(
    *,
    degrees: tuple[int, int] = (2, 4),
    strategies: tuple[Strategy, ...] = ("none", "S4"),
    limit_bytes: int | None = None,
) -> Space:
    budget = None
    if limit_bytes is not None:
        budget = MemoryBudget(workload=WORKLOAD, limit_bytes=limit_bytes, is_grouped=False)
    return Space(seed=SEED, degrees=degrees, strategies=strategies, budget=budget)


def decisions(largest: int = 5) -> list[Decision]:
    degrees = range(1, largest + 1)
    return [
        replace(SEED.with_degree(degree), strategy=strategy)
        for degree, strategy in itertools.product(degrees, STRATEGIES)
    ]


@pytest.mark.parametrize("of", [Decision(forward_degree=3, backward_degree=3), None])
@pytest.mark.parametrize("spare_bytes", [0, -1])
def test_what_is_allowed_is_inside_the_degrees_and_fits_to_the_byte(
    of: Decision | None, spare_bytes: int
) -> None:
    limit = None if of is None else bytes_of(of) + spare_bytes
    made = space(limit_bytes=limit)
    for decision in decisions():
        inside = decision.degree in {2, 3, 4}
        fits = limit is None or bytes_of(decision) <= limit
        wanted = decision == SEED or (inside and fits and decision.strategy in {"none", "S4"})
        assert made.allows(decision) is wanted, decision


@settings(deadline=None)
@given(
    decision=st.sampled_from(decisions(4)),
    limit_bytes=st.sampled_from(sorted({bytes_of(choice) for choice in decisions(6)})),
)
def test_a_decision_that_does_not_fit_gets_the_fewest_chunks_more_that_do(
    decision: Decision, limit_bytes: int
) -> None:
    made = space(degrees=(2, 5), strategies=(decision.strategy,), limit_bytes=limit_bytes)
    larger = [decision.with_degree(degree) for degree in range(max(decision.degree, 2), 6)]
    fitting = [choice for choice in larger if choice == SEED or bytes_of(choice) <= limit_bytes]
    assert made.fitting(decision) == (fitting[0] if fitting else decision)


@pytest.mark.parametrize(
    ("made", "single"),
    [
        (space(degrees=(2, 2), strategies=("none",)), True),
        (space(degrees=(2, 2), strategies=()), True),
        (space(degrees=(2, 2), strategies=("S4",)), False),
        (space(degrees=(2, 2)), False),
        (space(degrees=(2, 3), strategies=("none",)), False),
    ],
)
def test_a_single_degree_and_strategy_leave_nothing_to_try(
    made: Space,
    single: bool,  # noqa: FBT001 - a case
) -> None:
    assert made.is_single is single


def plan_for(
    *, limit_bytes: int | None = None, bounds: Bounds | None = None, taken: int = 0
) -> Plan:
    constraints = {"memory-taken": str(taken)} if taken else {}
    if bounds and bounds.strategy:
        constraints["strategy"] = bounds.strategy
    inputs = plan_inputs(
        layer=LayerShape(d_model=256, d_hidden=1024, num_experts=8), world_size=4,
        tokens_per_rank=4096, memory_limit_bytes=limit_bytes, constraints=constraints,
    )  # fmt: skip
    return replace(solution(inputs, bounds=bounds), terms=None)  # nothing of other strategies


def space_of(
    plan: Plan, *, around: tuple[Decision, ...] = (), reuse: Strategy | None = None
) -> Space:
    return search_space(
        plan=plan, tokens_per_rank=plan.inputs.tokens_per_rank, around=around, memory_reuse=reuse
    )


def limit_of(plan: Plan) -> int | None:
    budget = space_of(plan).budget
    if budget is None:
        return None
    tokens = plan.inputs.tokens_per_rank
    assert budget.workload.tokens_per_rank == int(tokens * (1 + REACH))
    return budget.limit_bytes


def pipelined_bytes(plan: Plan) -> int:
    """Return the bytes of two chunks without reuse, for the most tokens that a trial stands for."""
    reached = int(plan.inputs.tokens_per_rank * (1 + REACH))
    return bytes_of(SEED, replace(plan.workload, tokens_per_rank=reached))


def test_reuse_is_tried_only_where_two_chunks_do_not_fit_without_it() -> None:
    enough = pipelined_bytes(plan_for())
    roomy, tight = (plan_for(limit_bytes=enough - short) for short in (0, 1))
    assert space_of(roomy).strategies == ("none",)
    assert space_of(tight).strategies == STRATEGIES
    assert limit_of(roomy) == enough
    assert space_of(tight, reuse="S2").strategies == ("S2",)
    assert space_of(tight, reuse="S2").seed.strategy == "S2"
    pinned = plan_for(limit_bytes=enough - 1, bounds=Bounds(strategy="none"))
    assert space_of(pinned).strategies == ("none",)


def test_between_settled_sizes_only_their_strategies_and_the_plans_are_tried() -> None:
    tight = plan_for(limit_bytes=pipelined_bytes(plan_for()) - 1)
    below = Decision(forward_degree=2, backward_degree=2, strategy="S3")
    above = Decision(forward_degree=4, backward_degree=4, strategy="S1")
    narrow = space_of(tight, around=(below, above))
    assert set(narrow.strategies) == {"S1", "S3", narrow.seed.strategy}
    assert narrow.degrees == (2, 4)
    capped = replace(tight.inputs, constraints={"max-degree": "3"})
    fewer = replace(tight, inputs=capped, id=capped.plan_id)
    assert space_of(fewer, around=(above, below)).degrees == (2, 3)
    assert space_of(tight).strategies == STRATEGIES


def test_a_tensor_parallel_layer_reuses_no_memory_however_tight_it_is() -> None:
    plan = small_plan(layer=WORKLOAD.layer, expert_parallel="tensor")
    inputs = replace(plan.inputs, memory_limit_bytes=1)
    assert space_of(replace(plan, inputs=inputs, id=inputs.plan_id)).strategies == ("none",)


def test_what_the_rest_of_a_model_takes_is_not_the_layers() -> None:
    assert limit_of(plan_for(limit_bytes=2**30, taken=2**20)) == 2**30 - 2**20


def test_without_a_recorded_limit_the_plans_memory_is_the_limit_if_it_was_short() -> None:
    plan = plan_for()
    assert limit_of(plan) is None
    for short in (
        replace(plan, decision=replace(plan.decision, binding="memory")),
        replace(plan, memory=replace(plan.memory, strategy="S1")),
    ):
        assert limit_of(short) == plan.memory.peak_bytes


def test_a_pinned_degree_is_the_only_degree_and_the_seed_has_it() -> None:
    inputs = plan_inputs(
        world_size=8, tokens_per_rank=4096, constraints={"forward-degree": "3", "max-degree": "8"}
    )
    plan = solution(inputs, bounds=Bounds(forward_degree=3, max_degree=8))
    pinned = space_of(plan)
    assert pinned.degrees == (3, 3)
    assert pinned.seed.degree == 3


def test_strategies_that_the_plan_calls_hopeless_are_left_out_and_the_rest_ordered() -> None:
    ratios: dict[Strategy, float] = {"S1": 1.08, "S2": 1.5, "S3": 1.02, "S4": 1.25}
    tight = plan_for(limit_bytes=pipelined_bytes(plan_for()) - 1)
    seconds = tight.predicted.step_seconds
    rows = [
        StrategyTerms(
            strategy=name, forward_degree=2, backward_degree=2, step_seconds=seconds * ratio,
            needed_bytes=1, peak_bytes=1, host_bytes=0, saving_ratio=0.0, fits=True,
            is_chosen=False, paper_seconds=1.0, is_paper_choice=False, lost_because="slower",
        )
        for name, ratio in ratios.items()
    ]  # fmt: skip
    phase = PhaseTerms(
        degree=2, seconds=1.0, transfer_seconds=0.2, compute_seconds=0.2,
        total_transfer_seconds=0.8, total_compute_seconds=0.4, exposed_communication_seconds=0.6,
        hidden_seconds=0.2, transfer_trust="measured", compute_trust="measured",
    )  # fmt: skip
    terms = LayerTerms(forward=phase, backward=phase, strategies=tuple(rows))
    with_terms = replace(tight, terms=terms)
    assert space_of(with_terms).strategies == ("none", "S3", "S1")
