"""The search's rules on made-up layers whose times are known: found, pruned, stopped."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.solve.layer.degree import makespan
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
Times = Callable[[Decision], tuple[float, float]]


def space_of(forward: int, backward: int, *, largest: int = 64, low: int = 1) -> Space:
    return Space(
        seed=Decision(forward_degree=forward, backward_degree=backward),
        forward=(low, largest),
        backward=(low, largest),
        strategies=("none",),
        workload=Workload(layer=SHAPE, world_size=2, tokens_per_rank=1000),
        limit_bytes=None,
    )


def search(space: Space, times: Times) -> tuple[Tried, ...]:
    """Search without noise: every step of a trial takes as long."""
    tried: list[Tried] = []
    while (decision := next_decision(space=space, tried=tried)) is not None:
        assert space.allows(decision)
        assert decision not in [one.decision for one in tried]
        forward, backward = times(decision)
        repeats = (forward,) * REPEATS, (backward,) * REPEATS
        tried.append(
            Tried(decision=decision, forward_seconds=repeats[0], backward_seconds=repeats[1])
        )
    return tuple(tried)


@st.composite
def pipelines(draw: st.DrawFn) -> Callable[[int, float], float]:
    """The makespan of some costs: α and β of the transfer and of the experts."""
    exponents = [draw(st.floats(low, low + 3)) for low in (-6, -4, -6, -4)]
    start, share, start_c, share_c = (10**one for one in exponents)

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
    seed=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    bounds=st.tuples(st.integers(1, 64), st.integers(1, 64)).map(sorted),
)
def test_the_found_decision_is_within_two_percent_of_the_best_of_all(
    pipeline: Callable[[int, float], float], seed: tuple[int, int], bounds: list[int]
) -> None:
    low, high = bounds
    start = [min(max(one, low), high) for one in seed]
    space = space_of(*start, low=low, largest=high)
    tried = search(
        space, lambda d: (pipeline(d.forward_degree, 1.0), pipeline(d.backward_degree, 2.0))
    )
    found = best_tried(space=space, tried=tried)
    best = sum(
        min(pipeline(degree, factor) for degree in range(low, high + 1)) for factor in (1.0, 2.0)
    )
    assert found.median_seconds <= best * (1 + GAIN) ** 2 * 1.001
    assert len(tried) <= MAX_TRIALS


def curve(best: int) -> Callable[[int], float]:
    return lambda degree: 1.0 + 0.1 * abs(degree - best)


def test_a_right_answer_is_confirmed_by_its_neighbours_alone() -> None:
    space = space_of(3, 2)
    tried = search(space, lambda d: (curve(3)(d.forward_degree), curve(2)(d.backward_degree)))
    assert [(one.decision.forward_degree, one.decision.backward_degree) for one in tried] == [
        (3, 2), (4, 3), (2, 1),
    ]  # fmt: skip
    assert best_tried(space=space, tried=tried).decision == space.seed


def test_a_wrong_answer_far_away_is_left_in_few_trials() -> None:
    space = space_of(2, 2)
    tried = search(space, lambda d: (40 / d.forward_degree + d.forward_degree / 8, 1.0))
    found = best_tried(space=space, tried=tried)
    assert found.decision.backward_degree == 2
    assert 15 <= found.decision.forward_degree <= 22
    assert len(tried) <= 10


def test_the_plans_answer_is_kept_for_a_gain_that_is_too_small() -> None:
    space = space_of(4, 4)
    tried = search(space, lambda d: (1.0 - 0.004 * (d.forward_degree == 5), 1.0))
    assert best_tried(space=space, tried=tried).decision == space.seed


def test_a_search_in_noise_ends() -> None:
    values = iter(1 + 0.3 * math.sin(37 * n) for n in range(1000))
    tried = search(space_of(8, 8), lambda _: (next(values), next(values)))
    assert len(tried) <= MAX_TRIALS


def test_where_both_phases_cut_costs_extra_the_pair_itself_is_measured() -> None:
    """Degrees that are best apart are tried together before they are believed."""

    def times(d: Decision) -> tuple[float, float]:
        forward, backward = d.forward_degree, d.backward_degree
        apart = 0.3 * (forward != backward)
        return curve(3)(forward) + apart, curve(5)(backward) + apart

    space = space_of(4, 4)
    tried = search(space, times)
    found = best_tried(space=space, tried=tried)
    assert found.median_seconds == min(one.median_seconds for one in tried)
    assert found.decision.forward_degree == found.decision.backward_degree


def test_where_memory_has_room_for_no_fewer_chunks_only_the_plans_are_tried() -> None:
    space = replace(space_of(8, 16), limit_bytes=415_000)
    tried = search(space, lambda d: (curve(3)(d.forward_degree), curve(5)(d.backward_degree)))
    assert [one.decision for one in tried] == [space.seed]


@pytest.mark.parametrize(
    ("seconds", "worse"),
    [([1.2], False), ([1.2, 1.04], False), ([1.2, 1.06], True), ([0.9, 3.0, 3.0], False)],
)
def test_a_trial_is_clearly_worse_when_its_fastest_step_is(
    seconds: list[float], worse: bool  # noqa: FBT001 - a case
) -> None:  # fmt: skip
    assert is_clearly_worse(seconds, 1.0) is worse


def test_a_search_ends_after_its_most_trials_whatever_they_found() -> None:
    space = space_of(8, 8)

    def trial(degree: int) -> Tried:
        # Each degree is half as long as the one before: the next one always promises more.
        seconds = (2.0**-degree,) * REPEATS
        decision = Decision(forward_degree=degree, backward_degree=degree)
        return Tried(decision=decision, forward_seconds=seconds, backward_seconds=seconds)

    tried = [trial(degree) for degree in range(1, MAX_TRIALS + 1)]
    assert next_decision(space=space, tried=tried[:-1]) is not None
    assert next_decision(space=space, tried=tried) is None
