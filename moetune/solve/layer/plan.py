"""Plan of one layer, the last step of its solver: the best candidate with its alternatives."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Bounds, Strategy
from moetune.domain.cost_keys import CopyKey
from moetune.domain.costs import Costs, Refit, Trust, least_trust
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.kernels import KernelName
from moetune.domain.layer import PHASES, Phase
from moetune.domain.layout import Layout
from moetune.domain.placement import PlacementChoice
from moetune.domain.plan import (
    Alternative,
    Choice,
    Confidence,
    Pipeline,
    Plan,
    Predicted,
    Range,
    Verdict,
)
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.domain.samples import Direction
from moetune.domain.terms import LayerTerms, PhaseTerms, StrategyTerms
from moetune.domain.units import dtype_bytes, pinned_bytes
from moetune.solve.layer.choose import DegreeChooser, Ranking
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.kernels import MeasuredKernels
from moetune.solve.layer.memory import limit_of
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.peak import middle_elements
from moetune.solve.layer.strategies import RankedLayer, choose_safely, choose_strategy
from moetune.solve.layer.times import PhaseTime, StepTime
from moetune.solve.layer.uncertainty import judge_choice

MIN_TOP = 2**20
HEADROOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem:
    """A layer to plan for: the fastest plan within the bounds and the memory.

    Args:
        costs: nominal costs of the profile that the inputs name.
        resamples: refits of the same measurements, for the confidence in a choice; may be empty.
        bounds: pinned values; `inputs.constraints` records the same for the plan's id.
        device_memory_bytes: the limit if the inputs set none.
        kernels: experts' kernels that were measured for the layer; None for the usual kernel.
    """

    inputs: PlanInputs
    costs: Costs
    resamples: Sequence[Refit]
    bounds: Bounds
    device_memory_bytes: int
    provenance: Provenance
    launch: str
    kernels: MeasuredKernels | None

    def ranked(self, placement: tuple[int, ...] = ()) -> RankedLayer:
        """Return the candidates for a placement of experts, the plan's choice first.

        Raises:
            InputError: two different degrees are pinned.
            InfeasiblePlanError: a pinned degree is not allowed, or memory is too small.
            ProfileError: the profile lacks an operation that the layer needs.
        """
        self.bounds.check_degree(self.inputs.tokens_per_rank)
        if self.kernels is None:
            return self._ranked(placement, "")
        tried: dict[KernelName, RankedLayer] = {}
        *first, last = self.kernels.names
        for name in first:
            with suppress(InfeasiblePlanError):
                tried[name] = self._ranked(placement, name)
        try:
            tried[last] = self._ranked(placement, last)
        except InfeasiblePlanError:
            if not tried:
                raise
        seconds = {name: ranked.step.seconds for name, ranked in tried.items()}
        chosen = self.kernels.fastest(seconds)
        return replace(tried[chosen], kernel=self.kernels.choice(chosen, seconds))

    def _ranked(self, placement: tuple[int, ...], kernel: KernelName) -> RankedLayer:
        """Return the candidates with the given kernel of the experts."""
        inputs = self.inputs
        layout = Layout.of_layer(inputs.expert_parallel, inputs.world_size)
        workload = inputs.workload(layout, placement, kernel)
        ranked = choose_strategy(
            workload=workload,
            costs=layer_costs(workload=workload, costs=self.costs),
            bounds=self.bounds,
            limit_bytes=limit_of(inputs, device_memory_bytes=self.device_memory_bytes),
        )
        return choose_safely(ranked, self.resamples)

    def solved(
        self, ranked: RankedLayer, placement: PlacementChoice | None = None
    ) -> "SolvedLayer":
        """Return the plan of the candidates; ProfileError if a strategy's operation is missing."""
        inputs, ranking = self.inputs, ranked.best
        confidence = judge_choice(ranking, self.resamples, ranked.rivals)
        nearest = ranking.alternatives()
        plan = Plan(
            id=inputs.plan_id,
            inputs=inputs,
            layout=Layout.of_layer(inputs.expert_parallel, inputs.world_size),
            pipeline=Pipeline(
                forward_degree=ranking.degree,
                backward_degree=ranking.degree,
                order=ranking.order,
                ranges=solve_ranges(ranking.chooser, ranking.table.tokens, ranking.degree),
            ),
            memory=ranking.memory,
            predicted=_predicted(ranking, confidence, self.provenance),
            decision=_verdict(ranked, confidence, nearest),
            alternatives=tuple(_alternatives(ranked, nearest)),
            warnings=(),
            placement=placement,
            kernel=ranked.kernel,
            terms=LayerTerms(
                forward=phase_terms(ranked.step.forward),
                backward=phase_terms(ranked.step.backward),
                strategies=_strategy_terms(ranked),
            ),
        )
        return SolvedLayer(self, plan, ranked, nearest)


class SolvedLayer(NamedTuple):
    """A plan whose reasons and warnings are still empty, with the candidates that they describe.

    `nearest` holds other degrees, the best first; in the plan other strategies follow them.
    """

    problem: LayerProblem
    plan: Plan
    ranked: RankedLayer
    nearest: Sequence[StepTime]


def _alternatives(ranked: RankedLayer, nearest: Sequence[StepTime]) -> Iterator[Alternative]:
    """Yield other degrees, the best first, and other strategies."""
    for step in (*nearest, *(loser.step for loser in ranked.losers)):
        yield Alternative(**asdict(_choice(ranked.best, step)), lost_because="")


def _choice(ranking: Ranking, step: StepTime) -> Choice:
    is_reused = step.strategy != "none"
    return Choice(
        forward_degree=step.degree,
        backward_degree=step.degree,
        order="interleaved" if is_reused else ranking.chooser.bounds.chosen_order,
        strategy=step.strategy,
        step_seconds=step.seconds,
    )


def _verdict(ranked: RankedLayer, confidence: Confidence, nearest: Sequence[StepTime]) -> Verdict:
    ranking = ranked.best
    rest = [*nearest[:1], *ranked.rivals]
    runner_up = min(rest, key=lambda step: step.seconds, default=None)
    return Verdict(
        probability_best=confidence.probability_best,
        expected_regret=confidence.expected_regret,
        runner_up=None if runner_up is None else _choice(ranking, runner_up),
        binding="memory" if ranked.is_forced else ranking.step.binding,
        why="",
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
    """Return a row for each measured strategy; none in tensor parallelism."""
    best = ranked.best
    if best.budget.workload.expert_parallel == "tensor":
        return ()
    costs, tokens = best.chooser.costs, best.table.tokens
    strategies = (contender.strategy for contender in ranked.contenders)
    paper = {name: paper_seconds(costs=costs, strategy=name, tokens=tokens) for name in strategies}
    return tuple(_row(ranked, contender, paper) for contender in ranked.contenders)


def _row(ranked: RankedLayer, row: Ranking, paper: Mapping[Strategy, float]) -> StrategyTerms:
    """Return the row of one strategy."""
    reusing = [strategy for strategy in paper if strategy != "none"]
    peak = row.budget.peak(strategy=row.strategy, degree=row.degree)
    pins_host = row.chooser.costs.costs.copy_mode == "pinned"
    return StrategyTerms(
        strategy=row.strategy,
        forward_degree=row.degree,
        backward_degree=row.degree,
        step_seconds=row.step.seconds,
        needed_bytes=row.memory.formula_bytes,
        peak_bytes=peak.device_bytes,
        host_bytes=pinned_bytes(peak.host_bytes) if pins_host else peak.host_bytes,
        saving_ratio=row.memory.saving_ratio,
        fits=row.fits,
        is_chosen=row.strategy == ranked.best.strategy,
        paper_seconds=paper[row.strategy],
        is_paper_choice=row.strategy == min(reusing, key=paper.__getitem__, default=None),
        lost_because="",
    )


def solve_ranges(chooser: DegreeChooser, tokens: int, degree: int) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    A range's degree is the best for the geometric mean of its sizes. It fits at the last size and
    is allowed at the first. If nothing fits, it is the degree with the least memory.
    """
    spans = [(low + 1, high) for low, high in pairwise([0, *_sizes(chooser, tokens)])]
    ranges: list[Range] = []
    for (low, high), table in zip(spans, chooser.tables(spans), strict=True):
        chosen = degree if high == tokens else table.best() or chooser.least(high)
        if ranges and ranges[-1][2] == chosen:
            low = ranges.pop()[0]  # noqa: PLW2901 - equal neighbours are one range
        ranges.append((low, high, chosen, chosen))
    return tuple(ranges)


def _sizes(chooser: DegreeChooser, tokens: int) -> list[int]:
    """Return the spans' last sizes: powers of two, the plan's, a pin − 1, most that fit."""
    top = max(MIN_TOP, HEADROOM * tokens)
    powers = [2**step for step in range(top.bit_length())]
    sizes = {*powers, tokens, (chooser.bounds.degree or 1) - 1}
    if chooser.budget is not None:
        sizes |= {
            chooser.budget.most_tokens(strategy=chooser.strategy, degree=degree)
            for degree in powers
            if degree <= chooser.bounds.max_degree
        }
    return sorted({top, *(size for size in sizes if 1 <= size < top)})


def paper_seconds(*, costs: LayerCosts, strategy: Strategy, tokens: int) -> float:
    """Return the step by MPipeMoE's Eq. 10; it is shown next to the timeline and decides nothing.

        C = max(q₁·b·H·M/(σ·W_comp), q₂·b·M·s/(μ·W_comm), q₃·b·M·s/(η·W_mem)), both phases

    b is the number of rows on one rank; q generalises Table II. There are 2 GEMMs forward (3 for
    swiglu), twice as many backward, plus those that recompute T_M. There are 2 transfers, and
    another if T_DI is sent again, and copies of T_DI and T_M. The speeds W are those of the whole
    batch. The equation omits start-up times and the filling of the pipeline.

    Raises:
        ProfileError: the strategy copies, and no copies were measured.
    """
    return sum(_paper_phase(costs, strategy, tokens, phase) for phase in PHASES)


def _paper_phase(costs: LayerCosts, strategy: Strategy, tokens: int, phase: Phase) -> float:
    layer, rows = costs.layer, costs.rows(tokens)
    copied = layer.d_model * (strategy in OFFLOADS_INPUT)
    copied += middle_elements(layer) * (strategy in OFFLOADS_MIDDLE)
    speeds = costs.costs.speeds  # copying strategies overlap all three classes
    rivals = ("all", "all") if copied else ("comm", "comp")
    transfers, gemms = costs.num_transfers, layer.num_gemms
    if phase == "backward":
        gemms *= 2
        gemms += (layer.num_gemms - 1) * (strategy in {"S3", "S4"})
        transfers += strategy in {"S2", "S4"}
    gemm_seconds = costs.gemm("forward", rows=rows).seconds
    sent_seconds = costs.transfer(rows=rows, degree=1).seconds
    copied_seconds = NOTHING.seconds
    if copied:
        way: Direction = "d2h" if phase == "forward" else "h2d"
        copy = CopyKey(way, costs.costs.copy_mode != "pageable")
        num_bytes = rows * copied * dtype_bytes(costs.dtype)
        copied_seconds = costs.price(copy, num_bytes).seconds / speeds["mem", "all"]
    return max(
        (gemms * gemm_seconds / speeds["comp", rivals[0]]).item(),
        (transfers * sent_seconds / speeds["comm", rivals[1]]).item(),
        copied_seconds.item(),
    )
