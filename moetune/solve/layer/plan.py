"""Plan of one layer, the last step of its solver: the best candidate, and why it is the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import Bounds, Dispatcher, Order
from moetune.domain.costs import Costs, Trust, least_trust
from moetune.domain.layout import Layout
from moetune.domain.plan import (
    Alternative,
    Choice,
    Confidence,
    Pipeline,
    Plan,
    Predicted,
    Verdict,
)
from moetune.domain.profile import Provenance
from moetune.domain.request import OFFLOADS_INPUT, OFFLOADS_MIDDLE, PlanInputs
from moetune.domain.terms import LayerTerms, StrategyTerms
from moetune.solve.layer.choose import check_pins
from moetune.solve.layer.doubts import doubt_warnings, profile_command
from moetune.solve.layer.memory import limit_of, total_bytes
from moetune.solve.layer.parallelism import is_hierarchy_measured, layer_costs
from moetune.solve.layer.peak import has_grouped, peak_bytes
from moetune.solve.layer.ranges import solve_ranges
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.strategies import (
    Contender,
    RankedLayer,
    choose_dispatcher,
    choose_safely,
    choose_strategy,
    phase_terms,
    strategy_terms,
)
from moetune.solve.layer.times import StepTime
from moetune.solve.layer.uncertainty import judge_choice
from moetune.solve.layer.words import (
    ONE_RANK,
    PAGEABLE,
    binding_resource,
    explain_choice,
    explain_declined,
    explain_fewest,
    explain_loss,
    explain_memory,
    explain_peak,
    explain_strategy,
    explain_strategy_loss,
    reuses,
    trust_warnings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPlan:
    """A plan with the candidates that it was chosen from.

    Args:
        step: the chosen step of the layer; in a whole model of one MoE layer, with one
            micro-batch.
        ranked: the layer's memory strategies and degrees; None in a whole model, where the
            search over layouts bounds the memory.
    """

    plan: Plan
    step: StepTime
    ranked: RankedLayer | None

    @property
    def is_declined(self) -> bool:
        """Whether the layer would be cut into several chunks, had their times been measured."""
        return self.ranked is not None and self.ranked.declined is not None

    @property
    def strategies(self) -> tuple[StrategyTerms, ...]:
        """One row for each memory strategy; empty in a whole model and in tensor parallelism."""
        return () if self.ranked is None else strategy_terms(self.ranked)

    @property
    def terms(self) -> LayerTerms:
        """The terms of the chosen step, and of all memory strategies."""
        return LayerTerms(
            forward=phase_terms(self.step.forward),
            backward=phase_terms(self.step.backward),
            strategies=self.strategies,
        )


def rank_layer(
    *,
    inputs: PlanInputs,
    costs: Costs,
    bounds: Bounds,
    device_memory_bytes: int,
    num_nodes: int = 0,
) -> RankedLayer:
    """Return the candidates of a layer's plan, best first, of which `solve_plan` takes the first.

    Args:
        costs: nominal costs of the profile that the inputs name.
        bounds: what is pinned; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit where the inputs set none.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.

    Raises:
        InfeasiblePlanError: a pinned degree that the tokens or bounds do not allow, or more
            memory than there is.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    check_pins(bounds=bounds, tokens=inputs.tokens_per_rank)
    workload = inputs.workload(Layout.of_layer(inputs.expert_parallel, inputs.world_size))

    def rank(dispatcher: Dispatcher) -> RankedLayer:
        return choose_strategy(
            workload=workload,
            costs=layer_costs(
                workload=workload, costs=costs, num_nodes=num_nodes, dispatcher=dispatcher
            ),
            bounds=bounds,
            limit_bytes=limit_of(inputs, device_memory_bytes=device_memory_bytes),
        )

    if bounds.dispatcher is not None:
        return rank(bounds.dispatcher)
    flat = rank("flat")
    if not is_hierarchy_measured(workload=workload, costs=costs, num_nodes=num_nodes):
        return flat
    return choose_dispatcher(flat, rank("hierarchical"))


def solve_plan(
    *,
    inputs: PlanInputs,
    costs: Costs,
    resamples: Sequence[Costs],
    bounds: Bounds,
    device_memory_bytes: int,
    provenance: Provenance,
    num_nodes: int = 0,
) -> SolvedPlan:
    """Return the fastest plan within the bounds and the memory, and why it is the fastest.

    Args:
        costs: nominal costs of the profile that the inputs name.
        resamples: refits of the same measurements, for how sure the choice is; may be empty.
        bounds: what is pinned; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit where the inputs set none.
        provenance: of the profile.
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.

    Raises:
        InfeasiblePlanError, ProfileError: as `rank_layer`.
    """
    ranked = choose_safely(
        rank_layer(
            inputs=inputs,
            costs=costs,
            bounds=bounds,
            device_memory_bytes=device_memory_bytes,
            num_nodes=num_nodes,
        ),
        resamples,
    )
    plan = _plan_of(ranked, inputs=inputs, resamples=resamples, provenance=provenance)
    return SolvedPlan(plan=plan, step=ranked.step, ranked=ranked)


def _plan_of(
    ranked: RankedLayer,
    *,
    inputs: PlanInputs,
    resamples: Sequence[Costs],
    provenance: Provenance,
) -> Plan:
    ranking = ranked.best
    confidence = judge_ranked(ranked, resamples)
    others = ranking.others()
    return Plan(
        id=inputs.plan_id,
        inputs=inputs,
        layout=Layout.of_layer(inputs.expert_parallel, inputs.world_size),
        pipeline=_pipeline(ranking),
        memory=ranking.budget.memory(strategy=ranking.strategy, degrees=ranking.best.degrees),
        chunks=None,
        predicted=_predicted(ranking, confidence, provenance),
        decision=_verdict(ranked, confidence, others),
        alternatives=(
            *(_alternative(ranking, other) for other in others),
            *(_other_strategy(ranking, loser) for loser in ranked.losers),
            *_other_dispatcher(ranked),
        ),
        warnings=(
            *_trust_warnings(ranked, inputs, provenance, has_refits=bool(resamples)),
            *layer_warnings(ranking),
        ),
    )


def judge_ranked(ranked: RankedLayer, resamples: Sequence[Costs]) -> Confidence:
    """Return the confidence in the chosen strategy and degrees, under refits."""
    ranking = ranked.best
    return judge_choice(
        costs=ranking.costs,
        resamples=resamples,
        tokens=ranking.tokens,
        forward=ranking.forward,
        backward=ranking.backward,
        order=ranking.order,
        strategy=ranking.chooser.strategy,
        rivals=ranked.rivals,
    )


def layer_warnings(ranking: Ranking) -> Iterator[str]:
    """Yield warnings about the choice's memory, copies and pins."""
    limit, best = ranking.budget.limit_bytes, ranking.best
    peak = peak_bytes(
        workload=ranking.budget.workload,
        forward_degree=best.forward.degree,
        backward_degree=best.backward.degree,
        strategy=ranking.strategy,
        is_grouped=has_grouped(ranking.budget.workload, ranking.costs),
        dispatcher=ranking.costs.dispatcher,
    )
    # The limit bounds the papers' formulas, so that plans compare with theirs; the peak only warns.
    if peak.device_bytes > limit:
        yield explain_peak(peak_bytes=peak.device_bytes, limit_bytes=limit)
    offloads = ranking.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE
    if offloads and ranking.costs.costs.copy_mode == "pageable":
        yield PAGEABLE
    yield from ranking.pin_warnings()


def _trust_warnings(
    ranked: RankedLayer, inputs: PlanInputs, provenance: Provenance, *, has_refits: bool
) -> Iterator[str]:
    ranking = ranked.best
    compared = [ranking.best, ranking.sequential]
    if ranked.declined is not None:
        compared.append(ranked.declined.step)
    doubts = (doubt for step in compared for doubt in step.doubts)
    yield from trust_warnings(
        trust=ranking.best.trust,
        provenance=provenance,
        profile=inputs.profile,
        assumed_spread=has_refits and not ranking.chooser.is_measured,
        doubts=doubt_warnings(
            doubts, command=profile_command(inputs) if provenance == "measured" else ""
        ),
    )


def _pipeline(ranking: Ranking) -> Pipeline:
    forward_degree = ranking.best.forward.degree
    backward_degree = ranking.best.backward.degree
    return Pipeline(
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        order=ranking.order,
        dispatcher=ranking.costs.dispatcher,
        ranges=solve_ranges(
            chooser=ranking.chooser,
            tokens=ranking.tokens,
            forward_degree=forward_degree,
            backward_degree=backward_degree,
        ),
    )


def _predicted(ranking: Ranking, confidence: Confidence, provenance: Provenance) -> Predicted:
    best, sequential = ranking.best, ranking.sequential
    not_measured: tuple[Trust, ...] = () if provenance == "measured" else ("modelled",)
    return Predicted(
        forward_seconds=best.forward.seconds,
        backward_seconds=best.backward.seconds,
        step_seconds=best.seconds,
        sequential_forward_seconds=sequential.forward.seconds,
        sequential_backward_seconds=sequential.backward.seconds,
        overhead_seconds=best.overhead.seconds,
        p05_step_seconds=confidence.p05_step_seconds,
        p95_step_seconds=confidence.p95_step_seconds,
        trust=least_trust((best.trust, *not_measured)),
    )


def _alternative(ranking: Ranking, other: StepTime) -> Alternative:
    return Alternative(
        forward_degree=other.forward.degree,
        backward_degree=other.backward.degree,
        order=ranking.order,
        strategy=other.strategy,
        step_seconds=other.seconds,
        dispatcher=ranking.costs.dispatcher,
        lost_because=explain_loss(other=other, best=ranking.best),
    )


def _other_strategy(ranking: Ranking, loser: Contender) -> Alternative:
    return Alternative(
        forward_degree=loser.step.forward.degree,
        backward_degree=loser.step.backward.degree,
        order=_order(ranking, loser.step),
        strategy=loser.strategy,
        step_seconds=loser.step.seconds,
        dispatcher=ranking.costs.dispatcher,
        lost_because=explain_strategy_loss(
            other=loser.step,
            needed_bytes=total_bytes(loser.memory),
            limit_bytes=ranking.budget.limit_bytes,
            best=ranking.best,
        ),
    )


def _other_dispatcher(ranked: RankedLayer) -> Iterator[Alternative]:
    other, limit_bytes = ranked.other_dispatcher, ranked.best.budget.limit_bytes
    if other is not None:
        lost = explain_strategy_loss(
            other=other.best, needed_bytes=0, limit_bytes=limit_bytes, best=ranked.step
        )
        yield replace(_alternative(other, other.best), lost_because=lost)


def _order(ranking: Ranking, step: StepTime) -> Order:
    return ranking.bounds.chosen_order if step.strategy == "none" else "interleaved"


def _verdict(ranked: RankedLayer, confidence: Confidence, others: Sequence[StepTime]) -> Verdict:
    ranking = ranked.best
    rest = [*others[:1], *ranked.rivals]
    runner_up = min(rest, key=lambda step: step.seconds, default=None)
    choice = None
    if runner_up is not None:
        choice = Choice(
            forward_degree=runner_up.forward.degree,
            backward_degree=runner_up.backward.degree,
            order=_order(ranking, runner_up),
            strategy=runner_up.strategy,
            step_seconds=runner_up.seconds,
            dispatcher=ranking.costs.dispatcher,
        )
    return Verdict(
        probability_best=confidence.probability_best,
        expected_regret=confidence.expected_regret,
        runner_up=choice,
        binding="memory" if ranked.is_forced else binding_resource(ranking.best),
        why=_why(ranked, others[0] if others else None),
    )


def _why(ranked: RankedLayer, runner_up: StepTime | None) -> str:
    ranking = ranked.best
    without = next((one for one in ranked.losers if one.strategy == "none"), None)
    if without is not None and reuses(ranking.best) and not without.fits:
        memory = ranking.budget.memory(strategy=ranking.strategy, degrees=ranking.best.degrees)
        return explain_strategy(
            best=ranking.best,
            needed_bytes=total_bytes(memory),
            without_bytes=total_bytes(without.memory),
            limit_bytes=ranking.budget.limit_bytes,
        )
    if ranking.memory_forced and ranking.chooser.budget is not None:
        return explain_fewest(fewest=ranking.fewest_chunks)
    if ranking.memory_forced:
        return explain_memory(
            tokens=ranking.tokens, max_pipelined_tokens=int(ranking.chooser.max_pipelined_tokens)
        )
    if ranked.declined is not None:
        return explain_declined(
            several=ranked.declined.step,
            one_chunk=ranking.best,
            regret=ranked.declined.regret,
        )
    degrees = ranking.best.forward.degree, ranking.best.backward.degree
    if ranking.costs.world_size == 1 and max(degrees) == 1:
        return ONE_RANK
    return explain_choice(
        step=ranking.best,
        sequential=ranking.sequential,
        runner_up=runner_up,
        interference=ranking.costs.costs.interference,
    )
