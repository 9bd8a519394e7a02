"""Uncertainty of a choice, compared with others under many refits of the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetune.domain.constraints import Order
from moetune.domain.costs import Costs
from moetune.domain.model_plan import Confidence
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.refitted import RefittedTimes
from moetune.solve.layer.times import StepTime


def judge_choice(
    ranking: Ranking, resamples: Sequence[Costs], rivals: Sequence[StepTime] = ()
) -> Confidence:
    """Compare the chosen degrees and strategy with their contenders under each refit.

    The phases share no decision, so each is compared alone and the best of both are added.
    Without refits the nominal costs count as certain.

    Args:
        rivals: the best step of each other strategy that fits.
    """
    step = ranking.best
    rivals = [one for one in rivals if one.seconds <= step.seconds * HOPELESS]
    refits = RefittedTimes.of(ranking.costs, resamples, tokens=ranking.tokens, order=ranking.order)
    chosen, best = refits.compare(ranking.contenders, ranking.chooser.strategy)
    best = refits.faster(rivals, best)
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
    own, theirs = (
        RefittedTimes.of(one.costs, resamples, tokens=tokens, order=one.order).seconds(one.step)
        for one in (chosen, other)
    )
    return float(np.mean(theirs < own * (1 - TIE)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile, linear between neighbours."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
