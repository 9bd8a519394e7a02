"""Other strategies that may be the fastest, by what a plan predicted of them."""

from collections.abc import Sequence

from moetune.domain.constraints import Strategy
from moetune.domain.plan import Plan
from moetune.solve.layer.choose import WORTH

NEAR = 2
"""Predictions of one number of tokens say something of those up to so many times it."""


def promising_strategies(
    plan: Plan, tokens_per_rank: int, among: Sequence[Strategy]
) -> tuple[Strategy, ...]:
    """Return those of some strategies that may be the fastest, the most promising first.

    Left out is what is slower at its fastest than the plan's step at its slowest. The range of the
    plan's step, at least `WORTH` to each side, is taken for the others', too. What was not
    predicted, or only for a number of tokens far away, counts as being as fast as the plan.
    """
    own = plan.predicted
    strategies = () if plan.terms is None else plan.terms.strategies
    predicted = {one.strategy: one.step_seconds for one in strategies}
    is_near = plan.tokens_per_rank <= NEAR * tokens_per_rank <= NEAR**2 * plan.tokens_per_rank
    if not is_near or not own.step_seconds:
        return tuple(among)
    ratio = {one: predicted.get(one, own.step_seconds) / own.step_seconds for one in among}
    fastest = min(own.p05_step_seconds / own.step_seconds, 1 - WORTH)
    slowest = max(own.p95_step_seconds / own.step_seconds, 1 + WORTH)
    hopeful = [one for one in among if ratio[one] * fastest <= slowest]
    return tuple(sorted(hopeful, key=ratio.__getitem__))
