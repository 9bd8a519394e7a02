"""How sure a choice is: shares and percentiles over refits, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.costs import Costs, LinearCost, Refit
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.plan import Confidence, Decision
from moetune.solve.layer.choose import DegreeChooser, Ranking, rank_degrees
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.times import phase_time, step_time
from moetune.solve.layer.uncertainty import chance_of_faster, judge_choice
from tests.solve.costs_by_hand import ALL_TO_ALL, GEMM, LinearCosts
from tests.solve.reuse_by_hand import LayerByHand

WORKLOAD = Workload(
    layer=LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2),
    world_size=8,
    tokens_per_rank=4096,
    dtype="bfloat16",
)
NOMINAL = LinearCosts()


def _with_start_up(factor: float) -> LinearCosts:
    """Return costs whose transfers start slower: fewer chunks are better."""
    return replace(
        NOMINAL,
        transfer_cost=LinearCost(
            alpha_seconds=factor * ALL_TO_ALL.alpha_seconds, beta_seconds=ALL_TO_ALL.beta_seconds
        ),
    )


def ranked(costs: LayerCosts, bounds: Bounds | None = None, strategy: Strategy = "none") -> Ranking:
    """Return the best degrees where there is memory enough."""
    budget = MemoryBudget(workload=WORKLOAD, limit_bytes=2**60, is_grouped=False)
    ranking = rank_degrees(costs=costs, bounds=bounds or Bounds(), budget=budget, strategy=strategy)
    assert ranking is not None
    return ranking


def _judge(*resamples: Refit, bounds: Bounds | None = None) -> Confidence:
    costs = layer_costs(workload=WORKLOAD, costs=NOMINAL)
    return judge_choice(ranked(costs, bounds), resamples, rivals=())


def _best_degree(costs: Costs) -> int:
    chooser = DegreeChooser(costs=layer_costs(workload=WORKLOAD, costs=costs), bounds=Bounds())
    degree = chooser.degree(4096)
    assert degree is not None
    return degree


def _step_seconds(costs: Costs, degree: int) -> float:
    layer = layer_costs(workload=WORKLOAD, costs=costs)
    return step_time(costs=layer, tokens=4096, degree=degree).seconds


def test_without_refits_the_choice_is_certain() -> None:
    confidence = _judge()
    seconds = _step_seconds(NOMINAL, _best_degree(NOMINAL))
    assert (confidence.probability_best, confidence.expected_regret) == (1.0, 0.0)
    assert confidence.p05_step_seconds == confidence.p95_step_seconds == pytest.approx(seconds)


def test_probability_and_regret_count_the_refits_in_which_another_choice_is_better() -> None:
    chosen, other = _best_degree(NOMINAL), _with_start_up(0.1)
    assert _best_degree(other) != chosen
    regret = _step_seconds(other, chosen) / _step_seconds(other, _best_degree(other)) - 1
    confidence = _judge(NOMINAL, NOMINAL, NOMINAL, other)
    assert confidence.probability_best == 0.75
    assert confidence.expected_regret == pytest.approx(regret / 4)
    assert regret > 0.001


def test_percentiles_are_of_the_chosen_step_over_the_refits() -> None:
    chosen = _best_degree(NOMINAL)
    refits = [_with_start_up(0.5 + share / 100) for share in range(101)]
    ordered = sorted(_step_seconds(refit, chosen) for refit in refits)
    confidence = _judge(*refits)
    assert confidence.p05_step_seconds == pytest.approx(ordered[5])
    assert confidence.p95_step_seconds == pytest.approx(ordered[95])
    assert confidence.p05_step_seconds < confidence.p95_step_seconds


def test_another_strategy_is_timed_anew_under_each_refit() -> None:
    """Four chunks each way, inputs and middles copied (S1) against both made again (S4)."""
    by_hand = LayerByHand(
        d_model=1024, d_hidden=4096, num_experts=8, rows=8192, tokens=4096,
        exchange=(2e-4, 3e-10), gemm=(5e-5, 4e-14), copy=(1e-5, 1e-10),
    )  # fmt: skip
    layer = LayerShape(d_model=1024, d_hidden=4096, num_experts=8, top_k=2)
    lines = [(1.3e-10, 3e-10), (5e-11, 3e-10), (1.3e-10, 2e-10), (2e-10, 3e-10)]
    refits = [
        replace(
            NOMINAL,
            copy_mode="pinned",
            copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=copied),
            transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=sent),
        )
        for copied, sent in lines
    ]
    costs = layer_costs(workload=replace(WORKLOAD, layer=layer), costs=refits[0])
    bounds = Bounds(forward_degree=4)
    rival = step_time(costs=costs, tokens=4096, degree=4, strategy="S4")
    confidence = judge_choice(ranked(costs, bounds, "S1"), refits, [rival])
    truths = [
        replace(by_hand, copy=(1e-5, copied), exchange=(2e-4, sent)) for copied, sent in lines
    ]
    times = [[truth.step_seconds(strategy, 4) for truth in truths] for strategy in ("S1", "S4")]
    regrets = [max(0.0, copying / again - 1) for copying, again in zip(*times, strict=True)]
    assert [regret > 0 for regret in regrets] == [False, False, True, True]
    assert times[1][0] > times[0][2]  # by the nominal costs the other one is never better there
    assert confidence.probability_best == 0.5
    assert confidence.expected_regret == pytest.approx(sum(regrets) / 4)


@pytest.mark.parametrize("strategy", ["none", "S4"])
def test_what_is_not_simulated_could_not_have_been_the_best(strategy: Strategy) -> None:
    """Against every degree of the strategy, and its rivals, timed under every refit."""
    rng = np.random.default_rng(1)
    refits = [
        replace(
            NOMINAL,
            has_points=True,
            interference=Interference(comp=CompSpeed(comm=0.8), comm=CommSpeed(comp=0.7)),
            copy_mode="inline",
            copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=1e-11 * rng.uniform(0.1, 4)),
            transfer_cost=LinearCost(
                alpha_seconds=2e-4 * rng.uniform(0.3, 3), beta_seconds=1e-10 * rng.uniform(1, 3)
            ),
        )
        for _ in range(25)
    ]
    nominal = layer_costs(workload=WORKLOAD, costs=refits[0])
    ranking = ranked(nominal, Bounds(max_degree=4), strategy)
    others = [name for name in STRATEGIES if name not in {"none", strategy}]
    rivals = [step_time(costs=nominal, tokens=4096, degree=3, strategy=name) for name in others]
    confidence = judge_choice(ranking, refits, rivals)
    regrets, winners = [], set()
    for refit in refits:
        times: dict[Strategy, float] = {name: _seconds(refit, name, 3) for name in others}
        times[strategy] = min(_seconds(refit, strategy, degree) for degree in range(1, 5))
        winners.add(min(times, key=lambda name: times[name]))
        chosen = _seconds(refit, strategy, ranking.degree)
        regrets.append(chosen / min(times.values()) - 1)
    assert confidence.expected_regret == pytest.approx(sum(regrets) / len(regrets), rel=1e-9)
    assert sum(regret > 0 for regret in regrets) > 3
    assert len(winners) > 1 or strategy == "none"


def _seconds(costs: Costs, strategy: Strategy, degree: int) -> float:
    layer = layer_costs(workload=WORKLOAD, costs=costs)
    return sum(
        phase_time(costs=layer, phase=phase, tokens=4096, degree=degree, strategy=strategy).seconds
        for phase in PHASES
    )


def test_a_chance_is_the_share_of_refits_in_which_the_other_is_shorter() -> None:
    costs = layer_costs(workload=WORKLOAD, costs=NOMINAL)
    whole, other = ((costs, Decision(forward_degree=num, backward_degree=num)) for num in (1, 16))
    # A start-up of 2 ms costs 16 chunks 15 times 4 ms more in each pass, and hides less than that.
    dear = replace(ALL_TO_ALL, alpha_seconds=2e-3)
    free = replace(ALL_TO_ALL, alpha_seconds=0.0)
    base = LinearCosts(gemm_cost=replace(GEMM, alpha_seconds=0.0))
    refits = [replace(base, transfer_cost=line) for line in (free, dear, free, free)]
    assert chance_of_faster(whole, other, resamples=refits, tokens=4096) == 0.75
    assert chance_of_faster(other, whole, resamples=refits, tokens=4096) == 0.25
    assert chance_of_faster(whole, whole, resamples=refits, tokens=4096) == 0.0
    alone = chance_of_faster(whole, other, resamples=(), tokens=4096)
    assert alone == float(_step_seconds(NOMINAL, 16) < _step_seconds(NOMINAL, 1))
