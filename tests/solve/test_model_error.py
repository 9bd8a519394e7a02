"""The model's error in a plan's range and in its probability to be the best."""

import math
from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Confidence
from moetune.domain.step_errors import StepErrors
from moetune.fit.step_errors import DRIFT, MachineErrors
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.layer.uncertainty import error_factors, judge_choice
from tests.solve.costs_by_hand import LinearCosts
from tests.solve.test_uncertainty import WORKLOAD, ranked

NUM = 100
COSTS = layer_costs(workload=WORKLOAD, costs=LinearCosts())
TOKENS = WORKLOAD.tokens_per_rank


def errors_of(spread: float) -> StepErrors:
    return MachineErrors(records=(), spread=spread).of(COSTS.key, TOKENS)


def judge(errors: StepErrors, num: int = NUM) -> Confidence:
    nominal = LinearCosts(errors=errors)
    costs = layer_costs(workload=WORKLOAD, costs=nominal)
    rival = step_time(costs=costs, tokens=TOKENS, degree=4, strategy="S4")
    return judge_choice(ranked(costs), (nominal,) * num, [rival])


def width_of(confidence: Confidence) -> float:
    return math.log(confidence.p95_step_seconds / confidence.p05_step_seconds)


def test_errors_make_near_choices_uncertain_and_the_range_wide() -> None:
    judged = [judge(errors_of(spread)) for spread in (0.0, 0.05, 0.1)]
    sure = [confidence.probability_best for confidence in judged]
    assert sure == sorted(sure, reverse=True)
    assert sure[0] > sure[2] > 0.0
    assert judged == sorted(judged, key=lambda confidence: confidence.expected_regret)
    assert judged == sorted(judged, key=width_of)
    assert width_of(judged[0]) == pytest.approx(2 * 1.645 * DRIFT, rel=0.3)


def test_what_all_choices_miss_widens_the_range_alone() -> None:
    narrow, wide = (judge(replace(errors_of(0.05), shared=shared)) for shared in (0.0, 0.2))
    assert wide.probability_best == narrow.probability_best
    assert wide.expected_regret == pytest.approx(narrow.expected_regret)
    assert width_of(wide) == pytest.approx(2 * 1.645 * math.hypot(0.2, DRIFT, 0.05), rel=0.15)


class BySize(LinearCosts):
    """Whose steps of more tokens, and of more chunks, are further from their operations."""

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:  # noqa: ARG002 - of all
        return StepErrors(mean=np.array([0.0, 0.1, 0.3]) * tokens / TOKENS)


def test_factors_of_many_chunks_are_those_of_each() -> None:
    costs = layer_costs(workload=WORKLOAD, costs=BySize())
    degrees, tokens = np.array([1, 2, 3, 4, 4]), np.array([1.0, 1.0, 0.5, 2.0, 0.25]) * TOKENS
    rows = tokens * costs.rows(1.0) / degrees
    factors = costs.step_factor(rows=rows, degree=degrees)
    three = 0.1 + 0.2 * (math.log2(3) - 1)  # between those of two chunks and of four
    assert factors == pytest.approx(np.exp([0.0, 0.1, 0.5 * three, 2 * 0.3, 0.25 * 0.3]))


def test_the_only_choice_and_a_single_refit_are_sure_whatever_the_error() -> None:
    nominal = LinearCosts(errors=errors_of(0.2))
    costs = layer_costs(workload=WORKLOAD, costs=nominal)
    bounds = Bounds(forward_degree=4)
    single = judge_choice(ranked(costs, bounds), (nominal,) * NUM, rivals=())
    assert single.probability_best == 1.0
    assert single.p05_step_seconds < single.p95_step_seconds
    once = judge(errors_of(0.3), num=1)  # the nominal costs alone
    assert (once.probability_best, width_of(once)) == (1.0, 0.0)


def logs_of(errors: StepErrors, degree: int, strategy: Strategy = "none") -> Floats:
    return np.log(error_factors(errors, strategy, degree, num=NUM))


SPREAD = 0.1
TOTAL = math.hypot(SPREAD, DRIFT)


@pytest.mark.parametrize("degree", [1, 2, 8, 64, 4096])
def test_every_power_of_two_has_the_same_spread(degree: int) -> None:
    draws = errors_of(SPREAD)
    assert np.std(logs_of(draws, degree)) == pytest.approx(TOTAL, rel=0.2)
    assert np.mean(logs_of(draws, degree)) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(("apart", "shared"), [(1, 2 / 3), (2, 1 / 3), (3, 0.0)])
def test_degrees_share_the_less_of_their_error_the_more_octaves_they_are_apart(
    apart: int, shared: float
) -> None:
    draws = errors_of(SPREAD)
    pairs = [(2**at, 2 ** (at + apart)) for at in range(6)]
    shares = [np.corrcoef(logs_of(draws, low), logs_of(draws, high))[0, 1] for low, high in pairs]
    expected = (shared * SPREAD**2 + DRIFT**2) / TOTAL**2
    assert np.mean(shares) == pytest.approx(expected, abs=0.12)


def test_roots_of_the_covariance_are_what_deviates_are_taken_times() -> None:
    draws = StepErrors(mean=np.zeros(2), roots=np.diag([1.0, 2.0]))
    assert np.std(logs_of(draws, 2)) == pytest.approx(2 * np.std(logs_of(draws, 1)), rel=1e-9)
    assert abs(np.corrcoef(logs_of(draws, 1), logs_of(draws, 2))[0, 1]) < 0.3


def test_neighbouring_degrees_have_nearly_one_error_and_strategies_another() -> None:
    draws = errors_of(SPREAD)
    assert np.corrcoef(logs_of(draws, 15), logs_of(draws, 16))[0, 1] > 0.95
    assert abs(np.corrcoef(logs_of(draws, 4), logs_of(draws, 4, "S1"))[0, 1]) < 0.3
    assert (logs_of(draws, 1) == logs_of(draws, 1, "S1")).all()
