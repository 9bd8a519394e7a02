"""Choice of a memory strategy at its best degree, and the error that names what would fit."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, STRATEGIES, Bounds, Strategy
from moetune.domain.costs import Refit
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.kernels import KernelChoice
from moetune.domain.layer import Workload
from moetune.domain.layout import divisors
from moetune.domain.units import format_bytes, format_chunks
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser, Ranking, rank_degrees
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.peak import Peak
from moetune.solve.layer.times import StepTime, step_seconds
from moetune.solve.layer.uncertainty import refits_of

UNLIMITED = 2**62
NO_REUSE: tuple[Strategy, ...] = ("none",)
"""Strategies of a layer that reuses no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Several chunks that were declined, because they may lose more than they promise.

    Args:
        least_seconds: 5 % quantile of one chunk over the refits; None if times were not measured.
        mean_loss: expected loss of several chunks, as a share of one chunk's step.
    """

    step: StepTime
    least_seconds: float | None = None
    mean_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayer:
    """The chosen strategy with its degree, and all strategies at their best degrees.

    Args:
        contenders: each strategy whose operations were measured, including the chosen strategy.
        declined: several chunks that would be the choice by nominal costs alone.
    """

    best: Ranking
    contenders: tuple[Ranking, ...]
    declined: Declined | None = None
    kernel: KernelChoice | None = None

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.best.step

    @property
    def is_forced(self) -> bool:
        """Whether unlimited memory would change the choice."""
        if self.best.memory_forced:
            return True
        limit = self.step.seconds * (1 - TIE)
        return any(not loser.fits and loser.step.seconds < limit for loser in self.losers)

    @property
    def rivals(self) -> tuple[StepTime, ...]:
        """The best steps of the other strategies that fit in memory."""
        return tuple(loser.step for loser in self.losers if loser.fits)

    @property
    def losers(self) -> tuple[Ranking, ...]:
        """All contenders except the chosen strategy; none if the caller pinned the strategy."""
        if self.best.chooser.bounds.strategy is not None:
            return ()
        chosen = self.best.strategy
        return tuple(ranking for ranking in self.contenders if ranking.strategy != chosen)


def choose_strategy(
    *, workload: Workload, costs: LayerCosts, bounds: Bounds, limit_bytes: int
) -> RankedLayer:
    """Return the fastest strategy within the bounds and the memory.

    With measured costs, strategy "none" gives way only to a gain above `choose.WORTH`. Strategies
    within `choose.NOISE` of each other tie, and the first of them is taken.

    Raises:
        InfeasiblePlanError: nothing fits; it names the smallest plan, and what would make it fit.
        ProfileError: the pinned strategy copies, and no copies were measured.
    """
    budget = MemoryBudget.of(workload=workload, costs=costs, limit_bytes=limit_bytes)
    allowed = _allowed(budget, costs, bounds)
    allowed_names = _allowed(budget, costs, replace(bounds, strategy=None))
    rankings = {
        name: rank_degrees(costs=costs, bounds=bounds, budget=budget, strategy=name)
        for name in dict.fromkeys((*allowed_names, *allowed))
    }
    fitting = [ranking for name in allowed if (ranking := rankings[name]) is not None]
    if not fitting:
        raise _too_large(budget, allowed, DegreeChooser(costs=costs, bounds=bounds))
    best = _fastest(fitting)
    roomy = replace(budget, limit_bytes=UNLIMITED)
    for name in allowed_names:
        if rankings[name] is None:
            ranking = rank_degrees(
                costs=costs, bounds=replace(bounds, strategy=name), budget=roomy, strategy=name
            )
            assert ranking is not None  # noqa: S101 - everything fits without a limit
            rankings[name] = replace(ranking, budget=budget, fits=False)
    contenders = (ranking for name in allowed_names if (ranking := rankings[name]) is not None)
    return RankedLayer(best=best, contenders=tuple(contenders))


def choose_safely(ranked: RankedLayer, resamples: Sequence[Refit]) -> RankedLayer:
    """Return one chunk if the gain of several chunks may be an error of the profile.

    Nominal costs decide if they are measured. A time that was not may be far off, and more so the
    further a choice is from the measurements. Then the choice with the smaller expected loss over
    the refits is taken, because the refits are as wide as that error.

    Several chunks also gain if smaller products are measured as quicker for each row. The errors of
    the two sizes do not cancel, unlike errors of work that is merely hidden. If this is most of the
    gain, the gain must exceed the error of one chunk over the refits.
    """
    ranking, several, single = ranked.best, ranked.best.step, ranked.best.sequential
    if not ranking.has_one_chunk or several.degree == 1 or ranking.strategy != "none":
        return ranked
    is_measured = not (several.doubts or single.doubts)
    saved_seconds = single.work_seconds - several.work_seconds
    if not resamples or (is_measured and several.hidden_seconds > saved_seconds):
        return ranked
    refits = refits_of(ranking.chooser.costs, resamples, tokens=ranking.table.tokens)

    def seconds(degree: int) -> Floats:
        phases, overhead = step_seconds(
            costs=refits.stack, tokens=ranking.table.tokens, degree=degree, order=ranking.order
        )
        return phases + overhead

    if is_measured:
        declined = _luck(several, seconds(1))
    else:
        declined = _risk(several, seconds(several.degree) / seconds(1))
    if declined is None:
        return ranked
    best = ranking.in_one_chunk()
    contenders = (
        best if contender.strategy == best.strategy else contender
        for contender in ranked.contenders
    )
    return replace(ranked, best=best, contenders=tuple(contenders), declined=declined)


def _luck(several: StepTime, seconds_of_one: Floats) -> Declined | None:
    """Return several chunks as declined; None if their gain exceeds the error of one chunk."""
    least = float(np.percentile(seconds_of_one, 5))
    return None if several.seconds < least else Declined(step=several, least_seconds=least)


def _risk(several: StepTime, ratios: Floats) -> Declined | None:
    """Return several chunks that rest on unmeasured times as declined; None if they lose less.

    Args:
        ratios: seconds of several chunks over those of one chunk, for each refit.
    """
    loss, loss_of_one = (float(np.maximum(ratio - 1, 0.0).mean()) for ratio in (ratios, 1 / ratios))
    return None if loss < loss_of_one else Declined(step=several, mean_loss=loss)


def _allowed(budget: MemoryBudget, costs: LayerCosts, bounds: Bounds) -> Sequence[Strategy]:
    """Return the strategies that the pins allow and whose operations were measured."""
    if budget.keeps_all:
        return NO_REUSE
    copies = OFFLOADS_INPUT | OFFLOADS_MIDDLE
    if bounds.order == "dispatch_first" and bounds.strategy not in {None, "none"}:
        raise InfeasiblePlanError(
            f"strategy {bounds.strategy} with the order dispatch_first is infeasible: two buffers "
            "of received rows let two dispatches run ahead, no more",
            "omit --order, or take --order interleaved",
        )
    if bounds.strategy is None and bounds.order == "dispatch_first":
        return ["none"]
    if bounds.strategy is None:
        has_copies = costs.costs.copy_mode is not None
        return [name for name in STRATEGIES if has_copies or name not in copies]
    if bounds.strategy in copies and costs.costs.copy_mode is None:
        raise ProfileError(
            f"strategy {bounds.strategy} copies to the host, and the profile has no copies "
            "in both directions",
            "measure them with `moetune profile`, or take --strategy S4",
        )
    return [bounds.strategy]


def _fastest(rankings: Sequence[Ranking]) -> Ranking:
    least = min(ranking.step.seconds for ranking in rankings)
    is_measured = rankings[0].chooser.is_measured
    first = rankings[0]
    if first.strategy == "none" and least >= first.step.seconds * (1 - WORTH * is_measured):
        return first
    limit = least * (1 + (NOISE if is_measured else TIE))
    return next(ranking for ranking in rankings if ranking.step.seconds <= limit)


class _Choice(NamedTuple):
    strategy: Strategy
    degree: int
    peak: Peak

    @property
    def words(self) -> str:
        """The number of chunks in words."""
        return format_chunks(self.degree, self.degree)


def _too_large(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> InfeasiblePlanError:
    """Return the error for a layer that no allowed strategy fits, with what would fit."""
    smallest = _smallest(budget, allowed, chooser, budget.workload.tokens_per_rank)
    peak = smallest.peak
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({smallest.words}, strategy "
        f"{smallest.strategy}) peaks at {format_bytes(peak.device_bytes)} per device "
        f"(states {format_bytes(peak.state_bytes)}, activations "
        f"{format_bytes(peak.activation_bytes)}, buffers "
        f"{format_bytes(peak.buffer_bytes + peak.ring_bytes + peak.routing_bytes)}), "
        f"{format_bytes(peak.device_bytes - budget.limit_bytes)} more than the limit of "
        f"{format_bytes(budget.limit_bytes)}",
        _what_would_fit(budget, smallest, allowed, chooser),
    )


def _smallest(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser, tokens: int
) -> _Choice:
    """Return the choice with the smallest peak; the strategy with the least work if they tie."""
    choices = []
    for strategy in allowed:
        degree = replace(chooser, strategy=strategy, budget=budget).least(tokens)
        peak = budget.peak(strategy=strategy, degree=degree, tokens=tokens)
        choices.append(_Choice(strategy, degree, peak))
    return min(choices, key=lambda choice: choice.peak.device_bytes)


def _what_would_fit(
    budget: MemoryBudget, smallest: _Choice, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> str:
    planned = budget.workload.tokens_per_rank
    bounds = replace(chooser.bounds.without_degree(), strategy=None)
    if bounds != chooser.bounds:
        free = replace(chooser, bounds=bounds)
        nearest: tuple[Strategy, ...] = ("none", "S4")  # least work first, then least memory
        for strategy in nearest[:1] if budget.keeps_all else nearest:
            choice = _smallest(budget, [strategy], free, planned)
            if choice.peak.device_bytes <= budget.limit_bytes:
                return f"nearest: {choice.words} with strategy {strategy}"
    most = bisect_left(
        range(1, planned), True,  # noqa: FBT003 - looked for, no switch
        key=lambda tokens: _smallest(budget, allowed, chooser, tokens).peak.device_bytes
        > budget.limit_bytes,
    )  # fmt: skip
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {planned}"
    return _ranks_that_fit(budget, smallest)


def _ranks_that_fit(budget: MemoryBudget, smallest: _Choice) -> str:
    """Return words that name the fewest ranks on which the layer's tokens fit."""
    workload = budget.workload
    for ranks in divisors(workload.layer.num_experts):
        there = replace(budget, workload=replace(workload, world_size=ranks))
        if ranks > workload.world_size and there.fits(
            strategy=smallest.strategy, degree=smallest.degree
        ):
            return f"no number of tokens fits; it does on {ranks} ranks (--world-size {ranks})"
    return "no number of tokens fits: allow more memory, or take a smaller layer"
