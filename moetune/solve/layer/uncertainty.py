"""Uncertainty of a choice, compared with its contenders under many refits of the measurements.

Every time of a layer is an array with an entry for each refit, so that `LayerCosts` and the closed
forms compute all refits at once. A refit with a slower operation has a longer sum of operations.
The step itself was measured, so its difference from the sum is smaller there.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Refit
from moetune.domain.plan import Confidence, Decision
from moetune.domain.samples import StepRecord
from moetune.domain.step_errors import NO_STEP_ERRORS, StepErrors, at_degree
from moetune.solve.layer.choose import HOPELESS, Ranking
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.times import StepTime, step_seconds

_SEED = 0
LayerChoice = tuple[LayerCosts, Decision]
"""The costs of a layer, and a choice for it."""


def judge_choice(
    ranking: Ranking, resamples: Sequence[Refit], rivals: Sequence[StepTime]
) -> Confidence:
    """Compare the choice with its contenders under each refit; without refits it is certain."""
    limit_seconds = ranking.step.seconds * HOPELESS
    strategy = ranking.chooser.strategy
    contenders = [(degree, strategy) for degree in ranking.table.contenders(ranking.degree)]
    contenders += [(step.degree, step.strategy) for step in rivals if step.seconds <= limit_seconds]
    steps = _under_refits(
        ranking.chooser.costs, resamples, contenders, tokens=ranking.table.tokens,
        order=ranking.order,
    )  # fmt: skip
    return confidence_of(steps[0], np.minimum.reduce(steps))


def confidence_of(chosen: Floats, best: Floats) -> Confidence:
    """Return the confidence in a choice from its seconds and the best seconds, both (refits,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        regrets = np.where(best > 0, chosen / best - 1, 0.0)
    low, high = np.quantile(chosen, (0.05, 0.95)).tolist()
    return Confidence(
        probability_best=float((regrets <= TIE).mean()),
        expected_regret=float(regrets.mean()),
        p05_step_seconds=low,
        p95_step_seconds=high,
    )


def chance_of_faster(
    chosen: LayerChoice, rival: LayerChoice, *, resamples: Sequence[Refit], tokens: int
) -> float:
    """Return the share of refits under which the rival's step is shorter."""

    def seconds(choice: LayerChoice) -> Floats:
        costs, decision = choice
        wanted = [(decision.degree, decision.strategy)]
        (step,) = _under_refits(costs, resamples, wanted, tokens=tokens, order=decision.order)
        return step

    return float(np.mean(seconds(rival) < seconds(chosen) * (1 - TIE)))


def _under_refits(
    costs: LayerCosts, resamples: Sequence[Refit], choices: Iterable[tuple[int, Strategy]], *,
    tokens: int, order: Order,
) -> list[Floats]:  # fmt: skip
    """Return each choice's seconds under each refit, with the model's error, (refits,) each."""
    refits = refits_of(costs, resamples, tokens=tokens)
    errors, steps = costs.step_errors(tokens=tokens), []
    common = np.exp(errors.shared * _deviates("common", refits.num)) if refits.num > 1 else 1.0
    for degree, strategy in choices:
        phases, overhead = step_seconds(
            costs=refits.stack, tokens=tokens, degree=degree, order=order, strategy=strategy
        )
        factors = error_factors(errors, strategy, degree, num=refits.num)
        steps.append(np.broadcast_to((phases * factors + overhead) * common, refits.num))
    return steps


def error_factors(errors: StepErrors, strategy: Strategy, degree: int, *, num: int) -> Floats:
    """Return draws of the phases' error around its mean, shape (num,); 1 for a single refit."""
    if num == 1:
        return np.ones(1)
    name = strategy if degree > 1 else "none"  # one chunk reuses no memory
    deviates = np.array([_deviates(f"{name} {octave}", num) for octave in range(len(errors.roots))])
    factors: Floats = np.exp(at_degree(deviates.T @ errors.roots.T, degree))
    return factors


@lru_cache(maxsize=1024)
def _deviates(name: str, num: int) -> Floats:
    """Return quantiles of the normal distribution, in a permutation that depends on the name."""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((draw + 0.5) / num) for draw in range(num)])
    # Not hash(): it differs between processes.
    return np.random.default_rng([_SEED, zlib.crc32(name.encode())]).permutation(quantiles)


IMPLAUSIBLE = 0.2
"""Largest plausible residual of a refit: three standard deviations of the network lab's record
(`fit.step_errors.RECORDED_SPREAD`)."""
LEAST_SHARE = 0.5
"""Share of the refits that is kept at least, regardless of residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refits:
    """A layer's costs under `num` refits, stacked into one object."""

    num: int
    stack: LayerCosts


def refits_of(nominal: LayerCosts, resamples: Sequence[Refit], *, tokens: int) -> Refits:
    """Return the layer's costs under the refits that the measured steps do not contradict.

    Without any refit these are the nominal costs. Outside its measured sizes an operation is drawn
    from a wide range. Measured steps that contain it rule out most of that range.
    """
    # The resamples are remembered as well, so that no other object gets their id.
    _, refits = nominal.remembered(
        ("refits", tokens, id(resamples)), lambda: (resamples, _refits(nominal, resamples, tokens))
    )
    return refits


def _refits(nominal: LayerCosts, resamples: Sequence[Refit], tokens: int) -> Refits:
    errors = nominal.step_errors(tokens=tokens)
    if not errors.records or not resamples:
        costs = resamples[0].together(resamples) if resamples else nominal.costs
        return Refits(num=len(resamples) or 1, stack=replace(nominal, costs=costs))
    drawn = np.array([_residuals(record, resamples) for record in errors.records]).T
    largest = np.abs(drawn).max(axis=1)
    limit = max(IMPLAUSIBLE, np.sort(largest)[math.ceil(LEAST_SHARE * len(largest)) - 1])
    feasible = np.flatnonzero(largest <= limit)
    chosen = [resamples[draw] for draw in feasible.tolist()]
    costs = chosen[0].together(chosen)
    stack = replace(nominal, costs=costs, errors=errors.given(drawn[feasible]))
    return Refits(num=len(feasible), stack=stack)


def _residuals(record: StepRecord, resamples: Sequence[Refit]) -> list[float]:
    """Return the residual of a measured step under each refit."""
    load = record.workload
    layer = layer_costs(workload=load, costs=resamples[0].together(resamples))
    both = step_seconds(
        costs=replace(layer, errors=NO_STEP_ERRORS), tokens=load.tokens_per_rank,
        degree=record.degree,
    )  # fmt: skip
    chunks, overheads = (np.broadcast_to(seconds, len(resamples)).tolist() for seconds in both)
    return [
        replace(record, chunks_seconds=chunks_seconds, overhead_seconds=overhead_seconds).residual
        for chunks_seconds, overhead_seconds in zip(chunks, overheads, strict=True)
    ]
