"""Plan of one layer, the last step of its solver: the best candidate, and why it is the best."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Bounds
from moetune.domain.costs import Costs, Trust, least_trust
from moetune.domain.layout import Layout
from moetune.domain.model_plan import Confidence
from moetune.domain.placement import PlacementChoice
from moetune.domain.plan import Pipeline, Plan, Predicted
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.domain.terms import LayerTerms, StrategyTerms
from moetune.solve.layer.doubts import (
    PROFILE,
    doubt_warnings,
    profile_command,
)
from moetune.solve.layer.ranges import solve_ranges
from moetune.solve.layer.ranking import Ranking
from moetune.solve.layer.strategies import (
    RankedLayer,
    choose_safely,
    phase_terms,
    rank_layer,
    strategy_terms,
)
from moetune.solve.layer.times import StepTime
from moetune.solve.layer.uncertainty import judge_choice
from moetune.solve.layer.verdict import alternatives_of, verdict_of
from moetune.solve.layer.words import (
    PAGEABLE,
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
        num_nodes: that the layer's ranks are spread over evenly; 0 for consecutive ranks.
        has_ranges: solve for other numbers of tokens too; a plan without them is a draft, which
            takes half as long, and is not to be stored.
    """

    inputs: PlanInputs
    costs: Costs
    resamples: Sequence[Costs]
    bounds: Bounds
    device_memory_bytes: int
    provenance: Provenance
    launch: str = PROFILE
    num_nodes: int = 0
    has_ranges: bool = True

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
            device_memory_bytes=self.device_memory_bytes, num_nodes=self.num_nodes,
            placement=placement,
        )  # fmt: skip
        return choose_safely(ranked, self.resamples)

    def solved(self, ranked: RankedLayer, placement: PlacementChoice | None = None) -> SolvedPlan:
        """Return the plan of candidates that were ranked with that placement."""
        plan = replace(self._plan(ranked), placement=placement)
        return SolvedPlan(plan=plan, step=ranked.step, ranked=ranked)

    def _plan(self, ranked: RankedLayer) -> Plan:
        inputs, ranking = self.inputs, ranked.best
        confidence = judge_choice(ranking, self.resamples, ranked.rivals)
        others = ranking.others()
        return Plan(
            id=inputs.plan_id,
            inputs=inputs,
            layout=Layout.of_layer(inputs.expert_parallel, inputs.world_size),
            pipeline=_pipeline(ranking, has_ranges=self.has_ranges),
            memory=ranking.memory,
            predicted=_predicted(ranking, confidence, self.provenance),
            decision=verdict_of(ranked, confidence, others),
            alternatives=tuple(alternatives_of(ranked, others)),
            warnings=(
                *self._trust_warnings(ranked),
                *layer_warnings(ranking),
            ),
        )

    def _trust_warnings(self, ranked: RankedLayer) -> Iterator[str]:
        ranking, inputs = ranked.best, self.inputs
        compared = [ranking.step, ranking.sequential]
        if ranked.declined is not None:
            compared.append(ranked.declined.step)
        doubts = (doubt for step in compared for doubt in step.doubts)
        command = profile_command(inputs, self.launch) if self.provenance == "measured" else ""
        yield from trust_warnings(
            trust=ranking.step.trust,
            provenance=self.provenance,
            profile=inputs.profile,
            assumed_spread=bool(self.resamples) and not ranking.chooser.is_measured,
            doubts=doubt_warnings(doubts, command=command),
        )


def layer_warnings(ranking: Ranking) -> Iterator[str]:
    """Yield warnings about the choice's copies and pins."""
    offloads = ranking.strategy in OFFLOADS_INPUT | OFFLOADS_MIDDLE
    if offloads and ranking.costs.costs.copy_mode == "pageable":
        yield PAGEABLE
    yield from ranking.pin_warnings()


def _pipeline(ranking: Ranking, *, has_ranges: bool) -> Pipeline:
    forward_degree, backward_degree = ranking.degrees
    return Pipeline(
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        order=ranking.order,
        ranges=solve_ranges(ranking.chooser, ranking.tokens, ranking.degrees) if has_ranges else (),
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
