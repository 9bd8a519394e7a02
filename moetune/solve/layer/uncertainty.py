"""Uncertainty of a choice, compared with others under many refits of the measurements.

Under refits every time is an array, with one entry for each. Sums and products of times hold for
arrays as they hold for numbers, so that `LayerCosts` and the closed forms work out a layer once. An
operation that a refit makes slower makes the sum of a step's operations longer; the step itself was
measured, so that the difference between both is smaller there.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from statistics import NormalDist
from typing import cast

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs, costs_of_all
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Confidence, Decision
from moetune.domain.samples import StepRecord
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors, at_degree
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.times import StepTime, phase_time, step_time

_SEED = 0
_Phase = tuple[Phase, int, Strategy]
"""A phase in so many chunks."""
LayerChoice = tuple[LayerCosts, Decision]
"""A choice, and the costs of the layer that it is for."""


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
    near = [_phases(one.degrees, one.strategy) for one in rivals if one.seconds <= limit_seconds]
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


def chance_of_faster(
    chosen: LayerChoice, other: LayerChoice, *, resamples: Sequence[Costs], tokens: int
) -> float:
    """Return the share of refits under which the other choice's step is the shorter one.

    Args:
        resamples: without any the nominal costs count as certain.
    """

    def seconds(choice: LayerChoice) -> Floats:
        costs, decision = choice
        degrees = decision.forward_degree, decision.backward_degree
        phases = _phases(degrees, decision.strategy)
        around, found = _under_refits(costs, resamples, phases, tokens=tokens, order=decision.order)
        return sum(found.values(), around)

    return float(np.mean(seconds(other) < seconds(chosen) * (1 - TIE)))


def _under_refits(
    costs: LayerCosts, resamples: Sequence[Costs], wanted: Iterable[_Phase], *, tokens: int,
    order: Order,
) -> tuple[Floats, dict[_Phase, Floats]]:  # fmt: skip
    """Return the seconds around the phases, and of each phase, under each refit.

    Of phases the model's error is drawn, too.

    Returns:
        Arrays of shape (refits,).
    """
    refits = refits_of(costs, resamples, tokens=tokens)
    layer, num = refits.stack, refits.num
    errors = costs.step_errors(tokens=tokens)
    seconds = {}
    for name, degree, strategy in dict.fromkeys(wanted):
        time = phase_time(
            costs=layer, phase=name, tokens=tokens, degree=degree, order=order, strategy=strategy
        )
        factors = error_factors(errors, strategy, degree, num=num)
        seconds[name, degree, strategy] = np.broadcast_to(time.seconds, num) * factors
    return np.broadcast_to(layer.overhead(tokens=tokens).seconds, num), seconds


def error_factors(errors: StepErrors, strategy: Strategy, degree: int, *, num: int) -> Floats:
    """Return draws of the error of phases in so many chunks, around the expected one.

    Args:
        num: refits. A single one is the nominal costs, which count as certain.

    Returns:
        Shape (refits,).
    """
    if num == 1:
        return np.ones(1)
    name = strategy if degree > 1 else "none"  # one chunk reuses no memory
    deviates = np.array([_deviates(f"{name} {at}", num) for at in range(len(errors.roots))])
    found: Floats = np.exp(at_degree(deviates.T @ errors.roots.T, degree))
    return found


@lru_cache(maxsize=1024)
def _deviates(name: str, num: int) -> Floats:
    """Return normal deviates: the quantiles in random order, the same of a name in every run.

    Few draws have the spread of the distribution, too.
    """
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((at + 0.5) / num) for at in range(num)])
    # Not hash(): it differs between processes.
    return np.random.default_rng([_SEED, zlib.crc32(name.encode())]).permutation(quantiles)


def _phases(degrees: tuple[int, int], strategy: Strategy) -> tuple[_Phase, _Phase]:
    """Return the phases of a step; one chunk each way reuses nothing."""
    reused: Strategy = "none" if max(degrees) == 1 else strategy
    return ("forward", degrees[0], reused), ("backward", degrees[1], reused)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile, linear between neighbours."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


IMPLAUSIBLE = 0.2
"""A residual that no refit may have: three standard deviations of those in the network lab's
record (`fit.step_errors.RECORDED_SPREAD`)."""
LEAST_SHARE = 0.5
"""Of the refits that are kept, whatever their residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refits:
    """A layer's costs under `num` refits, all of them at once."""

    num: int
    stack: LayerCosts


def of_each(seconds: float, num: int) -> list[float]:
    """Return the seconds under each of so many refits, of stacked costs or the same for all."""
    return cast("list[float]", np.broadcast_to(seconds, num).tolist())


def refits_of(nominal: LayerCosts, resamples: Sequence[Costs], *, tokens: int) -> Refits:
    """Return the layer's costs under the refits that the measured steps do not contradict.

    Without any refit they are the nominal costs.

    Beyond its measured sizes an operation is drawn from a wide range, and most of that cannot be
    where steps that consist of it were measured.

    The nominal costs keep those that were asked of them first: a plan asks for them twice.

    Args:
        tokens: of a step on one rank.
    """

    def made() -> tuple[Sequence[Costs], Refits]:
        return resamples, _refits(nominal, resamples, tokens)

    of, refits = nominal.remembered(("refits", tokens), made)
    return refits if of is resamples else made()[1]


def _refits(nominal: LayerCosts, resamples: Sequence[Costs], tokens: int) -> Refits:
    errors = nominal.step_errors(tokens=tokens)
    if not errors.records or not resamples:
        costs = costs_of_all(resamples) if resamples else nominal.costs
        return Refits(num=len(resamples) or 1, stack=replace(nominal, costs=costs))
    drawn = np.array([_residuals(record, resamples) for record in errors.records]).T
    largest = np.abs(drawn).max(axis=1)
    limit = max(IMPLAUSIBLE, np.sort(largest)[math.ceil(LEAST_SHARE * len(largest)) - 1])
    kept = np.flatnonzero(largest <= limit)
    costs = costs_of_all([resamples[at] for at in kept.tolist()])
    stack = replace(nominal, costs=costs, errors=errors.given(drawn[kept]))
    return Refits(num=len(kept), stack=stack)


def _residuals(record: StepRecord, resamples: Sequence[Costs]) -> list[float]:
    """Return the record's residual under each refit."""
    load, num = record.workload, len(resamples)
    layer = layer_costs(workload=load, costs=costs_of_all(resamples))
    step = step_time(
        costs=replace(layer, errors=NO_STEP_ERRORS),
        tokens=load.tokens_per_rank,
        forward_degree=record.degree,
        backward_degree=record.degree,
    )
    chunks = of_each(step.forward.seconds + step.backward.seconds, num)
    return [
        replace(record, chunks_seconds=chunks_seconds, overhead_seconds=overhead_seconds).residual
        for chunks_seconds, overhead_seconds in zip(
            chunks, of_each(step.overhead.seconds, num), strict=True
        )
    ]
