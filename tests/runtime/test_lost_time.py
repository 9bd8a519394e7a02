"""The budget of lost time: what is charged, when it is spent, and how little goes beyond it."""

import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.tuner import BUDGET_SECONDS, LostTime
from moetune.solve.layer.online import REPEATS
from tests.runtime.online_workers import SHAPE, MadeUp, plan_of, study_tuner

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


def job(times: Callable[[int], float], budget_seconds: float) -> tuple[OnlineSearch, list[float]]:
    """Search two sizes on a fake clock; return the search and the time of every call.

    Args:
        times: of one phase, by its degree.
    """
    now: list[Decision] = []
    folder = Path(tempfile.mkdtemp())  # a study of its own
    search = OnlineSearch(
        make_tuner=lambda: study_tuner(folder),
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
    shutil.rmtree(folder)
    return search, seconds


@settings(max_examples=12, deadline=None)
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
