"""Choice of a memory strategy: each one at its best degrees, then the fastest one that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, STRATEGIES, Bounds, Strategy
from moetune.domain.costs import Costs
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.layer import Workload
from moetune.domain.layout import Layout
from moetune.domain.request import PlanInputs
from moetune.domain.terms import PhaseTerms, StrategyTerms
from moetune.domain.units import pinned_bytes
from moetune.solve.layer.budget import MemoryBudget
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.doubts import Declined, decline_chunks
from moetune.solve.layer.memory import device_bytes, limit_of, total_bytes
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.ranking import Ranking, rank_degrees
from moetune.solve.layer.times import PhaseTime, StepTime
from moetune.solve.layer.too_large import too_large
from moetune.solve.layer.words import explain_strategy_loss

UNLIMITED = 2**62
NO_REUSE: tuple[Strategy, ...] = ("none",)
"""The strategies where no memory is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayer:
    """The chosen strategy with its degrees, and all strategies at their best.

    Args:
        contenders: every strategy whose operations were measured, the chosen one too, in the
            order of their names.
        declined: several chunks that would have been the choice, had they been measured.
    """

    best: Ranking
    contenders: tuple[Ranking, ...]
    declined: Declined | None = None

    @property
    def step(self) -> StepTime:
        """The chosen step."""
        return self.best.step

    @property
    def is_forced(self) -> bool:
        """Whether another choice would be made if there were more memory."""
        if self.best.memory_forced:
            return True
        limit = self.step.seconds * (1 - TIE)
        return any(not one.fits and one.step.seconds < limit for one in self.losers)

    @property
    def rivals(self) -> tuple[StepTime, ...]:
        """The best steps of the other strategies that fit."""
        return tuple(one.step for one in self.losers if one.fits)

    @property
    def losers(self) -> tuple[Ranking, ...]:
        """All but the chosen one; none where the caller pinned the strategy."""
        if self.best.bounds.strategy is not None:
            return ()
        return tuple(one for one in self.contenders if one.strategy != self.best.strategy)


def rank_layer(
    *,
    inputs: PlanInputs,
    costs: Costs,
    bounds: Bounds,
    device_memory_bytes: int,
    placement: tuple[int, ...] = (),
) -> RankedLayer:
    """Return the candidates of a layer's plan, best first, of which a plan takes the first.

    Args:
        costs: nominal costs of the profile that the inputs name.
        bounds: what is pinned; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit where the inputs set none.
        placement: expert of each place; empty for the natural order.

    Raises:
        InfeasiblePlanError: a pinned degree that the tokens or bounds do not allow, or more
            memory than there is.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    bounds.check_degrees(inputs.tokens_per_rank)
    layout = Layout.of_layer(inputs.expert_parallel, inputs.world_size)
    workload = inputs.workload(layout, placement)
    return choose_strategy(
        workload=workload,
        costs=layer_costs(workload=workload, costs=costs),
        bounds=bounds,
        limit_bytes=limit_of(inputs, device_memory_bytes=device_memory_bytes),
    )


def choose_strategy(
    *, workload: Workload, costs: LayerCosts, bounds: Bounds, limit_bytes: int
) -> RankedLayer:
    """Return the fastest strategy within the bounds and the memory.

    Where costs are measured, keeping everything gives way only to a gain of `choose.WORTH`, and
    strategies within `choose.NOISE` of each other are one: the first of them is taken.

    Raises:
        InfeasiblePlanError: nothing fits; the text names the smallest plan, and the hint what
            would make it fit.
        ProfileError: the pinned strategy copies, and no copies were measured.
    """
    budget = MemoryBudget.of(workload=workload, costs=costs, limit_bytes=limit_bytes)
    allowed = _allowed(budget, costs, bounds)
    every = _allowed(budget, costs, replace(bounds, strategy=None))
    rankings = {
        name: rank_degrees(costs=costs, bounds=bounds, budget=budget, strategy=name)
        for name in dict.fromkeys((*every, *allowed))
    }
    fitting = [ranking for name in allowed if (ranking := rankings[name]) is not None]
    if not fitting:
        raise too_large(budget, allowed, DegreeChooser(costs=costs, bounds=bounds))
    best = _fastest(fitting)
    contenders = (rankings[name] or _without_limit(replace(best, strategy=name)) for name in every)
    return RankedLayer(best=best, contenders=tuple(contenders))


def choose_safely(ranked: RankedLayer, resamples: Sequence[Costs]) -> RankedLayer:
    """Return one chunk where several rest on what was not measured and may lose more.

    Args:
        resamples: refits of the measurements; without any the choice stays.
    """
    declined = decline_chunks(ranked.best, resamples)
    if declined is None:
        return ranked
    best = ranked.best.in_one_chunk()
    contenders = (best if one.strategy == best.strategy else one for one in ranked.contenders)
    return replace(ranked, best=best, contenders=tuple(contenders), declined=declined)


def _allowed(budget: MemoryBudget, costs: LayerCosts, bounds: Bounds) -> Sequence[Strategy]:
    """Return the strategies that no pin excludes and whose operations were measured."""
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
        return [one for one in STRATEGIES if has_copies or one not in copies]
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


def _without_limit(layer: Ranking) -> Ranking:
    """Return the best degrees of a strategy that fits in no number of chunks."""
    ranking = rank_degrees(
        costs=layer.costs,
        bounds=replace(layer.bounds, strategy=layer.strategy),
        budget=replace(layer.budget, limit_bytes=UNLIMITED),
        strategy=layer.strategy,
    )
    assert ranking is not None  # noqa: S101 - everything fits without a limit
    return replace(ranking, budget=layer.budget, fits=False)


def phase_terms(phase: PhaseTime) -> PhaseTerms:
    """Return the terms of one phase."""
    return PhaseTerms(
        degree=phase.degree,
        seconds=phase.seconds,
        gathering_seconds=phase.gathering.seconds,
        transfer_seconds=phase.transfer.seconds,
        compute_seconds=phase.compute.seconds,
        total_transfer_seconds=phase.link_seconds,
        total_compute_seconds=phase.device_seconds,
        exposed_communication_seconds=max(0.0, phase.seconds - phase.device_seconds),
        hidden_seconds=max(0.0, phase.work_seconds - phase.seconds),
        transfer_trust=phase.transfer.trust,
        compute_trust=phase.compute.trust,
    )


def strategy_terms(ranked: RankedLayer) -> tuple[StrategyTerms, ...]:
    """Return one row for each memory strategy whose operations were measured.

    None in tensor parallelism, where no memory is reused.
    """
    best = ranked.best
    if best.budget.workload.expert_parallel == "tensor":
        return ()
    return tuple(_row(ranked, contender) for contender in ranked.contenders)


def _row(ranked: RankedLayer, one: Ranking) -> StrategyTerms:
    budget = ranked.best.budget
    forward_degree, backward_degree = one.degrees
    peak = budget.peak(strategy=one.strategy, degrees=one.degrees)
    pins_host = ranked.best.costs.costs.copy_mode == "pinned"
    is_chosen = one.strategy == ranked.best.strategy
    lost = explain_strategy_loss(
        other=one.step,
        peak_bytes=device_bytes(one.memory),
        limit_bytes=budget.limit_bytes,
        best=ranked.step,
        is_pinned=ranked.best.bounds.strategy is not None,
    )
    return StrategyTerms(
        strategy=one.strategy,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        step_seconds=one.step.seconds,
        needed_bytes=total_bytes(one.memory),
        peak_bytes=peak.device_bytes,
        host_bytes=pinned_bytes(peak.host_bytes) if pins_host else peak.host_bytes,
        saving_ratio=one.memory.saving_ratio,
        fits=one.fits,
        is_chosen=is_chosen,
        lost_because="" if is_chosen else lost,
    )
