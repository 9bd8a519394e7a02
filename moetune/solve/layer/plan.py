"""Plan of one layer, the last step of its solver: the best candidate, and why it is the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, Trust, least_trust
from moetune.domain.layer import PHASES
from moetune.domain.layout import Layout
from moetune.domain.placement import PlacementChoice
from moetune.domain.plan import Confidence, Pipeline, Plan, Predicted, Range
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.domain.terms import LayerTerms, PhaseTerms, StrategyTerms
from moetune.domain.units import pinned_bytes
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.doubts import PROFILE, plan_warnings
from moetune.solve.layer.eq10 import paper_seconds
from moetune.solve.layer.memory import Degrees
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.strategies import RankedLayer, choose_safely, rank_layer
from moetune.solve.layer.times import PhaseTime
from moetune.solve.layer.uncertainty import judge_choice
from moetune.solve.layer.words import alternatives_of, explain_strategy_loss, verdict_of

MIN_TOP = 2**20
HEADROOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPlan:
    """A plan with the strategies and degrees that it was chosen from."""

    plan: Plan
    ranked: RankedLayer

    @property
    def terms(self) -> LayerTerms:
        """The terms of the chosen step, and of all memory strategies."""
        return LayerTerms(
            forward=phase_terms(self.ranked.step.forward),
            backward=phase_terms(self.ranked.step.backward),
            strategies=_strategy_terms(self.ranked),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem:
    """A layer to plan for: the fastest plan within the bounds and the memory.

    Args:
        costs: nominal costs of the profile that the inputs name.
        resamples: refits of the same measurements, for how sure the choice is; may be empty.
        bounds: what is pinned; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit where the inputs set none.
        provenance: of the profile.
        launch: begins the command that measures the inputs' ranks.
    """

    inputs: PlanInputs
    costs: Costs
    resamples: Sequence[Costs]
    bounds: Bounds
    device_memory_bytes: int
    provenance: Provenance
    launch: str = PROFILE

    def solve(self) -> SolvedPlan:
        """Return the plan with the experts in their natural order.

        Raises:
            InfeasiblePlanError, ProfileError: as `rank_layer`.
        """
        return self.solved(self.ranked())

    def ranked(self, placement: tuple[int, ...] = ()) -> RankedLayer:
        """Return the candidates with a placement of experts, the plan's choice first.

        Raises:
            InfeasiblePlanError, ProfileError: as `rank_layer`.
        """
        ranked = rank_layer(
            inputs=self.inputs, costs=self.costs, bounds=self.bounds,
            device_memory_bytes=self.device_memory_bytes,
            placement=placement,
        )  # fmt: skip
        return choose_safely(ranked, self.resamples)

    def solved(self, ranked: RankedLayer, placement: PlacementChoice | None = None) -> SolvedPlan:
        """Return the plan of candidates that were ranked with that placement."""
        plan = replace(self._plan(ranked), placement=placement)
        return SolvedPlan(plan=plan, ranked=ranked)

    def _plan(self, ranked: RankedLayer) -> Plan:
        inputs, ranking = self.inputs, ranked.best
        confidence = judge_choice(ranking, self.resamples, ranked.rivals)
        others = ranking.others()
        return Plan(
            id=inputs.plan_id,
            inputs=inputs,
            layout=Layout.of_layer(inputs.expert_parallel, inputs.world_size),
            pipeline=_pipeline(ranking),
            memory=ranking.memory,
            predicted=_predicted(ranking, confidence, self.provenance),
            decision=verdict_of(ranked, confidence, others),
            alternatives=tuple(alternatives_of(ranked, others)),
            warnings=tuple(
                plan_warnings(
                    ranked,
                    inputs,
                    self.provenance,
                    has_refits=bool(self.resamples),
                    launch=self.launch,
                )
            ),
        )


def _pipeline(ranking: Ranking) -> Pipeline:
    forward_degree, backward_degree = ranking.degrees
    return Pipeline(
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        order=ranking.order,
        ranges=solve_ranges(ranking.chooser, ranking.tokens, ranking.degrees),
    )


def _predicted(ranking: Ranking, confidence: Confidence, provenance: Provenance) -> Predicted:
    best, sequential = ranking.step, ranking.sequential
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


def _strategy_terms(ranked: RankedLayer) -> tuple[StrategyTerms, ...]:
    """Return one row for each memory strategy whose operations were measured.

    None in tensor parallelism, where no memory is reused.

    Raises:
        ProfileError: the profile lacks an operation of the layer.
    """
    best = ranked.best
    if best.budget.workload.expert_parallel == "tensor":
        return ()
    contenders = ranked.contenders
    paper = {
        each.strategy: paper_seconds(costs=best.costs, strategy=each.strategy, tokens=best.tokens)
        for each in contenders
    }
    reusing = [strategy for strategy in paper if strategy != "none"]
    paper_choice = min(reusing, key=lambda strategy: paper[strategy], default=None)
    return tuple(
        replace(
            _row(ranked, each),
            paper_seconds=paper[each.strategy],
            is_paper_choice=each.strategy == paper_choice,
        )
        for each in contenders
    )


def _row(ranked: RankedLayer, one: Ranking) -> StrategyTerms:
    """Return the terms of one strategy, without those of Eq. 10."""
    budget = ranked.best.budget
    forward_degree, backward_degree = one.degrees
    peak = budget.peak(strategy=one.strategy, degrees=one.degrees)
    pins_host = ranked.best.costs.costs.copy_mode == "pinned"
    is_chosen = one.strategy == ranked.best.strategy
    return StrategyTerms(
        strategy=one.strategy,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        step_seconds=one.step.seconds,
        needed_bytes=one.memory.formula_bytes,
        peak_bytes=peak.device_bytes,
        host_bytes=pinned_bytes(peak.host_bytes) if pins_host else peak.host_bytes,
        saving_ratio=one.memory.saving_ratio,
        fits=one.fits,
        is_chosen=is_chosen,
        paper_seconds=0.0,
        is_paper_choice=False,
        lost_because="" if is_chosen else explain_strategy_loss(ranked, one),
    )


def solve_ranges(chooser: DegreeChooser, tokens: int, degrees: Degrees) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    A range's degrees are the best ones for its geometric mean that fit its last size, and that its
    first size may have. Where nothing fits, they are those with the least memory.

    Args:
        tokens: the plan's own, per rank.
        degrees: the plan's own, forward and backward, which hold for `tokens`.
    """
    spans = [(low + 1, high) for low, high in pairwise([0, *_sizes(chooser, tokens)])]
    found: list[Range] = []
    for (low, high), chosen in zip(spans, _chosen(chooser, spans, tokens, degrees), strict=True):
        if found and found[-1][2:] == chosen:
            low = found.pop()[0]  # noqa: PLW2901 - equal neighbours are one range
        found.append((low, high, *chosen))
    return tuple(found)


def _sizes(chooser: DegreeChooser, tokens: int) -> list[int]:
    """Return the last sizes of spans, ascending.

    They are powers of two, the plan's own, those below pins, and the most that fit in 1, 2, 4 …
    chunks.
    """
    top = max(MIN_TOP, HEADROOM * tokens)
    powers = [2**step for step in range(top.bit_length())]
    sizes = {*powers, tokens, *((chooser.pinned(phase) or 1) - 1 for phase in PHASES)}
    if chooser.budget is not None:
        largest = chooser.bounds.max_degree
        for degree in (one for one in powers if one <= largest):
            degrees = degree, degree
            sizes.add(chooser.budget.most_tokens(strategy=chooser.strategy, degrees=degrees))
    return sorted({top, *(size for size in sizes if 1 <= size < top)})


def _chosen(
    chooser: DegreeChooser, spans: list[tuple[int, int]], tokens: int, degrees: Degrees
) -> Iterator[Degrees]:
    """Yield the degrees of each span."""
    for (_, high), table in zip(spans, chooser.tables(spans), strict=True):
        if high == tokens:
            yield degrees
        else:
            yield table.best() or chooser.least(high)
