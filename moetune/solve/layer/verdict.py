"""A plan's decision, and what lost against it and why.

The last step of a layer's plan, before `plan` puts its parts together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Alternative, Choice, Verdict
from moetune.solve.layer.memory import device_bytes
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.strategies import RankedLayer
from moetune.solve.layer.times import StepTime
from moetune.solve.layer.words import (
    ONE_RANK,
    binding_resource,
    explain_choice,
    explain_declined,
    explain_loss,
    explain_memory,
    explain_strategy,
    explain_strategy_loss,
    reuses,
)


def alternatives_of(ranked: RankedLayer, others: Sequence[StepTime]) -> Iterator[Alternative]:
    """Yield other degrees and strategies.

    Args:
        others: steps of the chosen strategy at other degrees, the best first.
    """
    ranking = ranked.best
    for other in others:
        yield _alternative(ranking, other, explain_loss(other=other, best=ranking.step))
    for loser in ranked.losers:
        lost = explain_strategy_loss(
            other=loser.step, peak_bytes=device_bytes(loser.memory),
            limit_bytes=ranking.budget.limit_bytes, best=ranking.step,
        )  # fmt: skip
        yield _alternative(ranking, loser.step, lost)


def _alternative(ranking: Ranking, step: StepTime, lost_because: str) -> Alternative:
    return Alternative(**asdict(_choice(ranking, step)), lost_because=lost_because)


def _choice(ranking: Ranking, step: StepTime) -> Choice:
    is_reused = step.strategy != "none"
    return Choice(
        forward_degree=step.forward.degree,
        backward_degree=step.backward.degree,
        order="interleaved" if is_reused else ranking.bounds.chosen_order,
        strategy=step.strategy,
        step_seconds=step.seconds,
    )


def verdict_of(ranked: RankedLayer, confidence: Confidence, others: Sequence[StepTime]) -> Verdict:
    """Return the decision and why it was taken.

    Args:
        others: steps of the chosen strategy at other degrees, the best first.
    """
    ranking = ranked.best
    rest = [*others[:1], *ranked.rivals]
    runner_up = min(rest, key=lambda step: step.seconds, default=None)
    return Verdict(
        probability_best=confidence.probability_best,
        expected_regret=confidence.expected_regret,
        runner_up=None if runner_up is None else _choice(ranking, runner_up),
        binding="memory" if ranked.is_forced else binding_resource(ranking.step),
        why=_why(ranked, others[0] if others else None),
    )


def _why(ranked: RankedLayer, runner_up: StepTime | None) -> str:
    ranking = ranked.best
    without = next((one for one in ranked.losers if one.strategy == "none"), None)
    if without is not None and reuses(ranking.step) and not without.fits:
        return explain_strategy(
            best=ranking.step,
            peak_bytes=device_bytes(ranking.memory),
            without_bytes=device_bytes(without.memory),
            limit_bytes=ranking.budget.limit_bytes,
        )
    if ranking.memory_forced:
        budget, wanted = ranking.budget, ranking.wanted
        return explain_memory(
            step=ranking.step,
            wanted=wanted,
            wanted_bytes=budget.peak(strategy="none", degrees=wanted.degrees).device_bytes,
            limit_bytes=budget.limit_bytes,
        )
    if ranked.declined is not None:
        return explain_declined(
            several=ranked.declined.step,
            one_chunk=ranking.step,
            regret=ranked.declined.regret,
        )
    if ranking.costs.world_size == 1 and max(ranking.degrees) == 1:
        return ONE_RANK
    return explain_choice(
        step=ranking.step,
        sequential=ranking.sequential,
        runner_up=runner_up,
        interference=ranking.costs.costs.interference,
    )
