"""Uncertainty of a choice, compared with others under many refits of the measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Costs
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Confidence
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.model_error import StepErrorDraws
from moetune.solve.layer.refits import refits_of
from moetune.solve.layer.reuse import lower_bound_seconds
from moetune.solve.layer.times import PhaseTime, StepTime, phase_time

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
    refits = refits_of(costs, resamples, tokens=tokens) or (costs,)
    draws = StepErrorDraws(costs.step_errors(tokens=tokens), num=len(refits))
    found: list[tuple[float, float]] = []
    for draw, one in enumerate(refits):
        refit = _Refit(
            costs=one,
            overhead_seconds=one.overhead(tokens=tokens).seconds,
            tokens=tokens,
            order=order,
            draws=draws,
            draw=draw,
        )
        chosen, best = refit.compare(contenders, strategy)
        for rival in rivals:
            best = refit.faster(rival, best)
        found.append((chosen, best))
    return confidence_of(found)


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
    own, theirs = (_seconds_of(one, resamples, tokens) for one in (chosen, other))
    wins = [its < mine * (1 - TIE) for mine, its in zip(own, theirs, strict=True)]
    return sum(wins) / len(wins)


def _seconds_of(one: TimedChoice, resamples: Sequence[Costs], tokens: int) -> list[float]:
    """Return a choice's step under each refit."""
    refits = refits_of(one.costs, resamples, tokens=tokens) or (one.costs,)
    draws = StepErrorDraws(one.costs.step_errors(tokens=tokens), num=len(refits))
    return [
        _Refit(
            costs=costs,
            overhead_seconds=costs.overhead(tokens=tokens).seconds,
            tokens=tokens,
            order=one.order,
            draws=draws,
            draw=draw,
        ).seconds(one.step)
        for draw, costs in enumerate(refits)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refit:
    """A layer's times under one refit of the costs, with that draw of the model's error."""

    costs: LayerCosts
    overhead_seconds: float
    tokens: int
    order: Order
    draws: StepErrorDraws
    draw: int

    def compare(
        self, contenders: Sequence[Sequence[int]], strategy: Strategy
    ) -> tuple[float, float]:
        """Return the seconds of the chosen step and of the best one.

        Args:
            contenders: degrees of each phase, the chosen one first.
        """
        chosen = best = self.overhead_seconds
        for phase, (first, *others) in zip(PHASES, contenders, strict=True):
            seconds = least = self._phase(phase, first, strategy)
            bounds = sorted((self._least(phase, degree, strategy), degree) for degree in others)
            for at_least, degree in bounds:
                if at_least >= least:
                    break
                least = min(least, self._phase(phase, degree, strategy))
            chosen += seconds
            best += least
        return chosen, best

    def faster(self, step: StepTime, seconds: float) -> float:
        """Return the smaller of the seconds and those of the step's degrees and strategy.

        Strategies that reuse memory are simulated, unless a lower bound is too long already.
        """
        strategy: Strategy = "none" if max(step.degrees) == 1 else step.strategy
        phases = tuple(zip(PHASES, step.degrees, strict=True))
        known = [self._least(phase, degree, strategy) for phase, degree in phases]
        for at, (phase, degree) in enumerate(phases):
            if self.overhead_seconds + sum(known) >= seconds:
                return seconds
            known[at] = self._phase(phase, degree, strategy)
        return min(seconds, self.overhead_seconds + sum(known))

    def seconds(self, step: StepTime) -> float:
        """Return the step of these degrees and that strategy."""
        strategy: Strategy = "none" if max(step.degrees) == 1 else step.strategy
        phases = zip(PHASES, step.degrees, strict=True)
        times = [self._phase(phase, degree, strategy) for phase, degree in phases]
        return math.fsum([self.overhead_seconds, *times])

    def _least(self, phase: Phase, degree: int, strategy: Strategy) -> float:
        """Return a lower bound of a phase that would be simulated, 0 of others."""
        if strategy == "none":
            return 0.0
        seconds = lower_bound_seconds(
            costs=self.costs, phase=phase, strategy=strategy, tokens=self.tokens, degree=degree
        )
        return seconds * self.draws.factor(strategy, degree, self.draw)

    def _phase(self, phase: Phase, degree: int, strategy: Strategy) -> float:
        seconds = phase_time(
            costs=self.costs,
            phase=phase,
            tokens=self.tokens,
            degree=degree,
            order=self.order,
            strategy=strategy,
        ).seconds
        return seconds * self.draws.factor(strategy, degree, self.draw)


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
