"""The search's rules on made-up layers whose times are known: found, pruned, stopped."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import SAFE_DECISION
from moetune.solve.layer.degree import makespan
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.online import (
    GAIN,
    MAX_TRIALS,
    REPEATS,
    Space,
    Tried,
    best_tried,
    is_clearly_worse,
    next_decision,
)

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4)
Times = Callable[[int], float]
"""Seconds of a step by its number of chunks."""


def space_of(degree: int, *, largest: int = 64, low: int = 1) -> Space:
    seed = SAFE_DECISION.with_degree(degree)
    return Space(seed=seed, degrees=(low, largest), strategies=("none",), budget=None)


def search(space: Space, times: Times) -> tuple[Tried, ...]:
    """Search without noise: every step of a trial takes as long."""
    tried: list[Tried] = []
    while (decision := next_decision(space=space, tried=tried)) is not None:
        assert space.allows(decision)
        assert decision not in [trial.decision for trial in tried]
        tried.append(Tried(decision=decision, seconds=(times(decision.degree),) * REPEATS))
    return tuple(tried)


@st.composite
def pipelines(draw: st.DrawFn) -> Callable[[int, float], float]:
    """The makespan of some costs: α and β of the transfer and of the experts."""
    exponents = [draw(st.floats(low, low + 3)) for low in (-6, -4, -6, -4)]
    start, share, start_c, share_c = (10**exponent for exponent in exponents)

    def seconds(degree: int, factor: float) -> float:
        return makespan(
            degree=degree,
            transfer_seconds=start + share / degree,
            compute_seconds=factor * (start_c + share_c / degree),
            comm_speed=1.0,
            comp_speed=1.0,
            order="dispatch_first",
        )

    return seconds


@settings(max_examples=200, deadline=None)
@given(
    pipeline=pipelines(),
    seed=st.integers(1, 64),
    bounds=st.tuples(st.integers(1, 64), st.integers(1, 64)).map(sorted),
)
def test_the_best_tried_decision_is_within_two_percent_of_the_best_of_all(
    pipeline: Callable[[int, float], float], seed: int, bounds: list[int]
) -> None:
    def times(degree: int) -> float:
        return pipeline(degree, 1.0) + pipeline(degree, 2.0)

    low, high = bounds
    space = space_of(min(max(seed, low), high), low=low, largest=high)
    tried = search(space, times)
    choice = best_tried(space=space, tried=tried)
    best = min(map(times, range(low, high + 1)))
    assert choice.median_seconds <= best * (1 + GAIN) ** 2 * 1.001
    assert len(tried) <= MAX_TRIALS


def curve(best: int) -> Callable[[int], float]:
    return lambda degree: 1.0 + 0.1 * abs(degree - best)


def test_a_right_answer_is_confirmed_by_its_neighbours_alone() -> None:
    space = space_of(3)
    tried = search(space, curve(3))
    assert [trial.decision.degree for trial in tried] == [3, 4, 2]
    assert best_tried(space=space, tried=tried).decision == space.seed


def test_a_wrong_answer_far_away_is_left_in_few_trials() -> None:
    space = space_of(2)
    tried = search(space, lambda degree: 40 / degree + degree / 8)
    choice = best_tried(space=space, tried=tried)
    assert 15 <= choice.decision.degree <= 22
    assert len(tried) <= 10


def test_the_plans_answer_is_kept_for_a_gain_that_is_too_small() -> None:
    space = space_of(4)
    tried = search(space, lambda degree: 1.0 - 0.008 * (degree == 5))
    assert best_tried(space=space, tried=tried).decision == space.seed


def test_a_search_in_noise_ends() -> None:
    values = iter(1 + 0.3 * math.sin(37 * n) for n in range(1000))
    tried = search(space_of(8), lambda _: next(values))
    assert len(tried) <= MAX_TRIALS


def test_where_memory_has_room_for_no_fewer_chunks_only_the_plans_are_tried() -> None:
    workload = Workload(layer=SHAPE, world_size=2, tokens_per_rank=1000)
    budget = MemoryBudget(workload=workload, limit_bytes=0, is_grouped=False)
    tight = replace(budget, limit_bytes=budget.peak(strategy="none", degree=64).device_bytes)
    space = replace(space_of(64), budget=tight)
    tried = search(space, curve(3))
    assert [trial.decision for trial in tried] == [space.seed]


@pytest.mark.parametrize(
    ("seconds", "worse"),
    [([1.2], False), ([1.2, 1.04], False), ([1.2, 1.06], True), ([0.9, 3.0, 3.0], False)],
)
def test_a_trial_is_clearly_worse_when_its_fastest_step_is(
    seconds: list[float], worse: bool  # noqa: FBT001 - a case
) -> None:  # fmt: skip
    assert is_clearly_worse(seconds, 1.0) is worse


def test_a_search_ends_after_its_most_trials_whatever_they_measured() -> None:
    space = space_of(8)

    def trial(degree: int) -> Tried:
        # Each degree is half as long as the one before: the next one always promises more.
        seconds = (2.0**-degree,) * REPEATS
        return Tried(decision=SAFE_DECISION.with_degree(degree), seconds=seconds)

    tried = [trial(degree) for degree in range(1, MAX_TRIALS + 1)]
    assert next_decision(space=space, tried=tried[:-1]) is not None
    assert next_decision(space=space, tried=tried) is None
