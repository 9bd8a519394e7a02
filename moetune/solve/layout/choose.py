"""Choice of a whole model's layout: the fastest one that fits, with the plan of its MoE layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraint_texts import EXPERT_PARALLEL
from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.costs import Costs, ModelError
from moetune.domain.model import Transformer
from moetune.domain.model_plan import Confidence
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.solve.layer.doubts import PROFILE
from moetune.solve.layer.memory import limit_of
from moetune.solve.layer.plan import LayerProblem, SolvedPlan
from moetune.solve.layer.strategies import UNLIMITED
from moetune.solve.layout.candidates import Candidate, SearchResult
from moetune.solve.layout.infeasible import nothing_fits, what_would_fit
from moetune.solve.layout.search import LayoutSearch, try_all
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.layout.uncertainty import NO_ERROR, judge_layout
from moetune.solve.model.prices import Prices, one_chunk_of
from moetune.solve.runtime import MOETUNE, TargetRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProblem:
    """A model to lay out, its batch and pins, and the machine's costs and limits.

    Args:
        resamples: refits of the profile's measurements; may be empty.
        bounds: of the MoE layer's chunks.
        per_node: devices of a node.
        device_memory_bytes: the limit where the inputs set none.
        host_bytes: that one rank may take of its host; None where unknown.
        launch: begins the command that measures the inputs' ranks.
        error: of a predicted step of the model, besides that of its costs.
        runs_ahead: whether the host starts operations while the device still computes others.
    """

    inputs: PlanInputs
    model: Transformer
    pins: LayoutPins
    costs: Costs
    resamples: Sequence[Costs]
    bounds: Bounds
    per_node: int
    device_memory_bytes: int
    provenance: Provenance
    runs_ahead: bool
    launch: str = PROFILE
    runtime: TargetRuntime = MOETUNE
    host_bytes: int | None = None
    error: ModelError = NO_ERROR

    @property
    def limit_bytes(self) -> int:
        """Bytes that the model may take of a device."""
        return limit_of(self.inputs, device_memory_bytes=self.device_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLayout:
    """The fastest layout that fits, and the layouts it was chosen from.

    Args:
        problem: with one chunk in each layer where several were declined.
        layer: the plan of the MoE layer in the fastest layout.
        why_declined: why several chunks were; empty where they were not.
    """

    problem: LayoutProblem
    search: LayoutSearch
    found: SearchResult
    layer: SolvedPlan
    why_declined: str = ""

    def judge(self, resamples: Sequence[Costs]) -> Confidence:
        """Return the confidence in the layout under refits."""
        return judge_layout(self.search, self.found.best, resamples, self.problem.error)


def choose_layout(problem: LayoutProblem) -> ChosenLayout:
    """Return the fastest layout that fits; with one chunk where several may lose more.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as `solve_layout`.
    """
    if problem.pins.overlap == "none":
        problem = replace(problem, bounds=one_chunk_of(problem.bounds))
    search, found = search_layouts(problem)
    layer = _layer(problem, search, found.best[0])
    if layer.is_declined:
        in_one = replace(problem, bounds=one_chunk_of(problem.bounds))
        return replace(choose_layout(in_one), why_declined=layer.plan.decision.why)
    return ChosenLayout(problem=problem, search=search, found=found, layer=layer)


def search_layouts(problem: LayoutProblem) -> tuple[LayoutSearch, SearchResult]:
    """Return all layouts in the order of their time; at least one fits.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as `solve_layout`.
    """
    inputs, search = problem.inputs, _search(problem)
    layouts = find_layouts(
        model=problem.model,
        world_size=inputs.world_size,
        batch=search.batch,
        pins=problem.pins,
        runtime=problem.runtime,
    )
    found = try_all(search, layouts)
    if not found.best and found.unpriced:
        raise found.unpriced[0][1]
    if not found.best:
        hint = what_would_fit(search, inputs=inputs)
        raise nothing_fits(
            found.unfit[0], limit_bytes=search.limit_bytes, host_bytes=search.host_bytes, hint=hint
        )
    return search, found


def _search(problem: LayoutProblem) -> LayoutSearch:
    """Return the search of a problem: its prices, its batch and its limits."""
    inputs = problem.inputs
    return LayoutSearch(
        prices=Prices(
            model=problem.model,
            dtype=inputs.dtype,
            costs=problem.costs,
            bounds=problem.bounds,
            per_node=problem.per_node,
            runtime=problem.runtime,
            runs_ahead=problem.runs_ahead,
        ),
        batch=whole_batch(
            model=problem.model,
            tokens_per_rank=inputs.tokens_per_rank,
            world_size=inputs.world_size,
        ),
        pins=problem.pins,
        limit_bytes=problem.limit_bytes,
        host_bytes=problem.host_bytes,
    )


def _layer(problem: LayoutProblem, search: LayoutSearch, best: Candidate) -> SolvedPlan:
    """Return the plan of one MoE layer in the layout.

    It has no memory limit: the search over layouts has checked that it fits.
    """
    trial, inputs = search.trial(best.layout), problem.inputs
    workload = trial.settings.workload(best.setting)
    kind = workload.expert_parallel
    in_one = best.setting.one_chunk or problem.model.is_dense
    bounds = one_chunk_of(problem.bounds) if in_one else problem.bounds
    return LayerProblem(
        inputs=replace(
            inputs,
            world_size=workload.world_size,
            tokens_per_rank=workload.tokens_per_rank,
            memory_limit_bytes=None,
            constraints={EXPERT_PARALLEL: kind} if kind == "tensor" else {},
        ),
        costs=problem.costs,
        resamples=problem.resamples,
        bounds=replace(bounds, strategy="none"),
        device_memory_bytes=UNLIMITED,
        provenance=problem.provenance,
        launch=problem.launch,
        num_nodes=trial.groups.experts.num_nodes,
    ).solve()
