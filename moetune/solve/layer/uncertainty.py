"""Uncertainty of a choice, compared with others under many refits of the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs
from moetune.domain.model_plan import Confidence
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.refitted import RefittedTimes
from moetune.solve.layer.times import PhaseTime, StepTime

NUM_CONTENDERS = 4
HOPELESS = 1.2
"""Times the nominal best above which no refit makes a degree the best one."""


def judge_choice(
    *,
    costs: LayerCosts,
    resamples: Sequence[Costs],
    tokens: int,
    forward: Sequence[PhaseTime],
    backward: Sequence[PhaseTime],
    order: Order,
    strategy: Strategy = "none",
    rivals: Sequence[StepTime] = (),
) -> Confidence:
    """Compare the chosen degrees and strategy with their contenders under each refit.

    The phases share no decision, so each is compared alone and the best of both are added.
    Without refits the nominal costs count as certain.

    Args:
        costs: the nominal ones.
        forward: the ranked degrees of the phase, the chosen one first.
        backward: the same.
        strategy: the chosen one.
        rivals: the best step of each other strategy that fits.
    """
    limit_seconds = _hopeless_seconds(costs, tokens, forward, backward)
    rivals = [one for one in rivals if one.seconds <= limit_seconds]
    contenders = _shortlist(forward), _shortlist(backward)
    refits = RefittedTimes.of(costs, resamples, tokens=tokens, order=order)
    chosen, best = refits.compare(contenders, strategy)
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


def _hopeless_seconds(
    costs: LayerCosts, tokens: int, forward: Sequence[PhaseTime], backward: Sequence[PhaseTime]
) -> float:
    """Return the time above which no refit makes a rival the best one."""
    overhead = costs.overhead(tokens=tokens).seconds
    return (forward[0].seconds + backward[0].seconds + overhead) * HOPELESS


def _shortlist(ranked: Sequence[PhaseTime]) -> tuple[int, ...]:
    """Return the chosen degree, then its nearest contenders and the powers of two."""
    limit = ranked[0].seconds * HOPELESS
    return tuple(
        time.degree
        for place, time in enumerate(ranked)
        if place == 0
        or (time.seconds <= limit and (place <= NUM_CONTENDERS or time.degree.bit_count() == 1))
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile, linear between neighbours."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
