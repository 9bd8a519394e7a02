"""Uncertainty of a choice, compared with others under many refits of the measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs
from moetune.domain.layer import PHASES, Phase
from moetune.domain.model_plan import Confidence
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.model_error import StepErrorDraws
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.refits import stacked_refits
from moetune.solve.layer.reuse import chunk_of
from moetune.solve.layer.reuse_times import ReusedPhases, reused_seconds
from moetune.solve.layer.times import StepTime, phase_time

_Phase = tuple[Phase, int, Strategy]
"""A phase in so many chunks."""


def judge_choice(
    ranking: Ranking, resamples: Sequence[Costs], rivals: Sequence[StepTime] = ()
) -> Confidence:
    """Compare the chosen degrees and strategy with their contenders under each refit.

    The phases share no decision, so each is compared alone and the best of both are added.
    Without refits the nominal costs count as certain.

    Args:
        rivals: the best step of each other strategy that fits.
    """
    limit_seconds = ranking.step.seconds * HOPELESS
    near = [_phases(one) for one in rivals if one.seconds <= limit_seconds]
    contenders: list[list[_Phase]] = [
        [(phase, degree, ranking.chooser.strategy) for degree in degrees]
        for phase, degrees in zip(PHASES, ranking.contenders, strict=True)
    ]
    around, seconds = _under_refits(
        ranking.costs, resamples, chain(*contenders, *near), tokens=ranking.tokens,
        order=ranking.order,
    )  # fmt: skip
    chosen = best = around
    for phases in contenders:
        chosen = chosen + seconds[phases[0]]
        best = best + np.minimum.reduce([seconds[phase] for phase in phases])
    steps = (around + (seconds[forward] + seconds[backward]) for forward, backward in near)
    best = np.minimum.reduce([best, *steps])
    return confidence_of(list(zip(chosen.tolist(), best.tolist(), strict=True)))


def confidence_of(found: Sequence[tuple[float, float]]) -> Confidence:
    """Return the confidence in a choice.

    Args:
        found: seconds of the chosen step and of the best one under each refit; at least one.
    """
    steps = sorted(chosen for chosen, _ in found)
    regrets = [chosen / best - 1 if best else 0.0 for chosen, best in found]
    return Confidence(
        probability_best=sum(regret <= TIE for regret in regrets) / len(regrets),
        expected_regret=sum(regrets) / len(regrets),
        p05_step_seconds=_quantile(steps, 0.05),
        p95_step_seconds=_quantile(steps, 0.95),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedChoice:
    """A choice of one layer with its nominal step."""

    costs: LayerCosts
    step: StepTime
    order: Order


def chance_of_faster(
    chosen: TimedChoice, other: TimedChoice, *, resamples: Sequence[Costs], tokens: int
) -> float:
    """Return the share of refits under which the other choice's step is the shorter one.

    Args:
        resamples: without any the nominal costs count as certain.
    """

    def seconds(choice: TimedChoice) -> Floats:
        around, found = _under_refits(
            choice.costs, resamples, _phases(choice.step), tokens=tokens, order=choice.order
        )
        return sum(found.values(), around)

    return float(np.mean(seconds(other) < seconds(chosen) * (1 - TIE)))


def _under_refits(
    costs: LayerCosts, resamples: Sequence[Costs], wanted: Iterable[_Phase], *, tokens: int,
    order: Order,
) -> tuple[Floats, dict[_Phase, Floats]]:  # fmt: skip
    """Return the seconds around the phases, and of each phase, under each refit.

    Of phases the model's error is drawn, too. All that are simulated are so at once.

    Returns:
        Arrays of shape (refits,).
    """
    refits = stacked_refits(costs, resamples, tokens=tokens)
    layer, num = refits.stack, refits.num
    errors = StepErrorDraws(costs.step_errors(tokens=tokens), num=num)
    phases = list(dict.fromkeys(wanted))
    reusing = [phase for phase in phases if phase[2] != "none"]
    simulated = reused_seconds([_reused(layer, phase, tokens, num) for phase in reusing])
    seconds = dict(zip(reusing, simulated, strict=True))
    for name, degree, strategy in phases:
        if strategy == "none":
            time = phase_time(costs=layer, phase=name, tokens=tokens, degree=degree, order=order)
            seconds[name, degree, strategy] = np.broadcast_to(time.seconds, num)
    around = np.broadcast_to(layer.overhead(tokens=tokens).seconds, num)
    return around, {phase: seconds[phase] * errors.factors(phase[2], phase[1]) for phase in phases}


def _reused(layer: LayerCosts, phase: _Phase, tokens: int, num: int) -> ReusedPhases:
    """Return a phase that reuses memory under each of so many refits."""
    name, degree, strategy = phase
    rows = layer.rows(tokens, degree=degree)
    chunk = chunk_of(costs=layer, phase=name, strategy=strategy, rows=rows, degree=degree)
    table = layer.interference(rows=rows, degree=degree)
    return ReusedPhases(chunk, name, np.full(num, degree), table)


def _phases(step: StepTime) -> tuple[_Phase, _Phase]:
    """Return the phases of a step; one chunk each way reuses nothing."""
    strategy: Strategy = "none" if max(step.degrees) == 1 else step.strategy
    forward, backward = step.degrees
    return ("forward", forward, strategy), ("backward", backward, strategy)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile, linear between neighbours."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
