"""The budget of lost time: what is charged, when it is spent, and how little goes beyond it."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.tuner import BUDGET_SECONDS, LostTime, TuningTask
from moetune.solve.layer.online import (
    REPEATS,
    Tried,
    best_tried,
    is_clearly_worse,
    next_decision,
)
from tests.runtime.online_workers import HARDWARE_ID, SHAPE, MadeUp, plan_of

KEY = LayerKey(layer=SHAPE, num_ranks=1, dtype="float64")
MOST_STEPS_OF_A_TRIAL = REPEATS + 1


def test_a_step_is_charged_with_its_calls_excess_over_the_best_decision() -> None:
    lost = LostTime(budget_seconds=1.0)
    lost.charge(call_seconds=9.0, best_seconds=None, num_calls=2)
    assert lost.lost_seconds == 0
    lost.charge(call_seconds=1.25, best_seconds=1.0, num_calls=3)
    assert lost.lost_seconds == 0.75
    lost.charge(call_seconds=0.5, best_seconds=1.0, num_calls=3)
    assert (lost.lost_seconds, lost.is_spent) == (0.75, False)
    lost.charge(call_seconds=1.25, best_seconds=1.0, num_calls=1)
    assert (lost.lost_seconds, lost.is_spent) == (1.0, False)
    lost.charge(call_seconds=1.25, best_seconds=1.0, num_calls=1)
    assert lost.is_spent


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(InputError, match="search_budget_seconds"):
        LostTime(budget_seconds=budget)
    assert LostTime().budget_seconds == BUDGET_SECONDS == 3600 / 100


class MemoryTuner:
    """The rules of a study, without its file."""

    def begin(self, task: TuningTask) -> Decision | Settled:
        self.task, self.tried = task, list[Tried]()
        return self._next()

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        self.forward.append(forward_seconds)
        self.backward.append(backward_seconds)
        seconds = [sum(both) for both in zip(self.forward, self.backward, strict=True)]
        best = self.best_seconds()
        is_pruned = best is not None and is_clearly_worse(seconds, best)
        if len(seconds) < REPEATS and not is_pruned:
            return self.trying
        self.tried.append(
            Tried(
                decision=self.trying,
                forward_seconds=tuple(self.forward),
                backward_seconds=tuple(self.backward),
            )
        )
        return self._next()

    def best_seconds(self) -> float | None:
        return min((one.median_seconds for one in self.tried), default=None)

    def settle(self) -> Settled:
        best = best_tried(space=self.task.space, tried=self.tried)
        return Settled(
            plan_id=self.task.plan.id, hardware_id=HARDWARE_ID, memory_reuse=None,
            tokens_per_rank=self.task.tokens_per_rank, decision=best.decision,
            seconds=best.seconds, planned_seconds=self.tried[0].median_seconds, num_steps=1,
        )  # fmt: skip

    def store(self, plan: Plan, settled: Settled) -> Settled:
        raise NotImplementedError

    def _next(self) -> Decision | Settled:
        decision = next_decision(space=self.task.space, tried=self.tried)
        if decision is None:
            return self.settle()
        self.trying, self.forward, self.backward = decision, list[float](), list[float]()
        return decision


def job(times: Callable[[int], float], budget_seconds: float) -> tuple[OnlineSearch, list[float]]:
    """Search two sizes on a fake clock; return the search and the time of every call.

    Args:
        times: of one phase, by its degree.
    """
    now: list[Decision] = []
    search = OnlineSearch(
        make_tuner=MemoryTuner,
        budget_seconds=budget_seconds,
        clock=lambda phase, _: MadeUp(
            times(now[-1].forward_degree if phase == "forward" else now[-1].backward_degree)
        ),
    )
    layer = search.layer(KEY, [plan_of(1)], None)
    seconds = []
    for step in range(200):
        tokens = (40, 90)[step % 2]
        now.append(layer.decide(tokens))
        seconds.append(times(now[-1].forward_degree) + times(now[-1].backward_degree))
        watch = layer.watch(tokens, torch.device("cpu"))
        x = torch.ones(1, requires_grad=True)
        watch.begin()
        y = x * 2
        watch.end_forward(y)
        y.backward()
        search.step()
    return search, seconds


@settings(max_examples=40, deadline=None)
@given(
    by_degree=st.lists(st.floats(0.1, 10.0), min_size=100, max_size=100),
    budget_seconds=st.floats(0.0, 40.0),
)
def test_no_job_loses_more_than_its_budget_and_one_trial(
    by_degree: list[float], budget_seconds: float
) -> None:
    search, seconds = job(lambda degree: by_degree[degree], budget_seconds)
    most_of_a_trial = MOST_STEPS_OF_A_TRIAL * (max(seconds) - min(seconds))
    assert search.lost.lost_seconds <= budget_seconds + most_of_a_trial
    assert search.has_ended is (search.lost.lost_seconds > budget_seconds)
    assert search.trial is None
    for last in (seconds[-20::2], seconds[-19::2]):
        assert len(set(last)) == 1, "decisions still change"


def test_a_spent_budget_ends_the_search_on_the_best_decision_known() -> None:
    """Each chunk more or less than planned costs a second; the budget bears one such step."""
    plan = plan_of(1).decide(40)
    search, seconds = job(lambda degree: 1.0 + abs(degree - plan.forward_degree), 1.0)
    assert search.has_ended
    assert 1.0 < search.lost.lost_seconds <= 1.0 + MOST_STEPS_OF_A_TRIAL * 2
    free, _ = job(lambda degree: 1.0 + abs(degree - plan.forward_degree), math.inf)
    assert not free.has_ended
    assert free.lost.lost_seconds > search.lost.lost_seconds
    assert seconds[-2] == seconds[0]
