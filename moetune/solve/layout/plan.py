"""Plan of a whole model: the fastest layout that fits, and the plan of its MoE layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import EXPERT_PARALLEL, Bounds, LayoutPins
from moetune.domain.costs import Costs, ModelError
from moetune.domain.errors import ProfileError
from moetune.domain.model import Transformer
from moetune.domain.plan import (
    Alternative,
    Chunks,
    Memory,
    ModelBinding,
    Part,
    Plan,
    StageTime,
    TransformerPlan,
)
from moetune.domain.profile import Provenance
from moetune.domain.request import PlanInputs
from moetune.solve.layer.doubts import doubt_warnings, profile_command
from moetune.solve.layer.memory import layer_memory, limit_of
from moetune.solve.layer.plan import SolvedPlan, layer_warnings, solve_plan
from moetune.solve.layer.strategies import UNLIMITED
from moetune.solve.layer.words import trust_warnings
from moetune.solve.layout.candidates import Candidate, SearchResult, Unfit
from moetune.solve.layout.chunked import can_chunk
from moetune.solve.layout.infeasible import nothing_fits, what_would_fit
from moetune.solve.layout.search import LayoutSearch, try_all
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.layout.uncertainty import NO_ERROR, judge_layout
from moetune.solve.layout.words import (
    binding_of,
    doubts_in,
    explain_chunks,
    explain_layout,
    explain_layout_loss,
    explain_unfit,
    omission_warnings,
    parts_of,
    runtime_warnings,
    trust_of,
    unmeasured_warnings,
)
from moetune.solve.model.prices import Prices, one_chunk_of
from moetune.solve.runtime import MOETUNE, TargetRuntime

NUM_LAYOUTS = 6
"""Most layouts, of those that fit, that a plan lists after the best."""
NUM_UNFIT = 2
"""Most layouts that nearly fit that it lists, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProblem:
    """A model to lay out, its batch and pins, and the machine's costs and limits.

    Args:
        resamples: refits of the profile's measurements; may be empty.
        bounds: of the MoE layer's chunks.
        per_node: devices of a node.
        device_memory_bytes: the limit where the inputs set none.
        host_memory_bytes: of one node; None where unknown.
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
    runtime: TargetRuntime = MOETUNE
    host_memory_bytes: int | None = None
    error: ModelError = NO_ERROR

    @property
    def host_bytes(self) -> int | None:
        """Bytes that one rank may take of its host; None where unknown."""
        if self.host_memory_bytes is None:
            return None
        return self.host_memory_bytes // min(self.per_node, self.inputs.world_size)

    @property
    def limit_bytes(self) -> int:
        """Bytes that the model may take of a device."""
        return limit_of(self.inputs, device_memory_bytes=self.device_memory_bytes)


def solve_layout(problem: LayoutProblem) -> SolvedPlan:
    """Return the fastest layout that fits, with the plan of the MoE layer in it, and why.

    Raises:
        InputError: the ranks, the pins, the layers, heads, experts or sequences do not divide.
        InfeasiblePlanError: no layout fits into memory.
        ProfileError: every layout that fits needs an operation that was not measured.
    """
    search, found = search_layouts(problem)
    best = found.best[0]
    solved = _layer(problem, search, best)
    if solved.is_declined:
        in_one = replace(problem, bounds=one_chunk_of(problem.bounds))
        return _with_reason(solve_layout(in_one), solved.plan.decision.why)
    parts = parts_of(best, search.prices.stages(best.layout.pp))
    binding = binding_of(best, parts)
    layer = solved.plan
    words = explain_layout(
        best=best,
        parts=parts,
        binding=binding,
        runner_up=found.best[1] if len(found.best) > 1 else None,
    )
    if best.chunks is not None:
        words += f" {explain_chunks(best.chunks, num_micro_batches=best.setting.num_micro_batches)}"
    if not problem.model.is_dense:
        words += f" In the MoE layer: {layer.decision.why}"
    plan = replace(
        layer,
        id=problem.inputs.plan_id,
        inputs=problem.inputs,
        layout=best.layout,
        memory=_layer_memory(search, layer),
        chunks=_chunks(search, best),
        decision=replace(layer.decision, why=words),
        alternatives=(
            *layer.alternatives,
            *_losers(search, found, parts),
            *_too_large(search, found),
        ),
        warnings=tuple(dict.fromkeys(_warnings(problem, found, solved))),
        transformer=replace(
            _transformer(problem, best, parts, binding, stages_of(search, best)),
            confidence=judge_layout(search, found.best, problem.resamples, problem.error),
        ),
    )
    return SolvedPlan(plan=plan, step=solved.step, ranked=None)


def _with_reason(solved: SolvedPlan, why: str) -> SolvedPlan:
    """Return the plan with one chunk in each layer, and why that is so."""
    plan = solved.plan
    return replace(solved, plan=replace(plan, warnings=(why, *plan.warnings)))


def search_layouts(problem: LayoutProblem) -> tuple[LayoutSearch, SearchResult]:
    """Return all layouts in the order of their time; at least one fits.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as `solve_layout`.
    """
    inputs, model = problem.inputs, problem.model
    batch = whole_batch(
        model=model, tokens_per_rank=inputs.tokens_per_rank, world_size=inputs.world_size
    )
    layouts = find_layouts(
        model=model,
        world_size=inputs.world_size,
        batch=batch,
        pins=problem.pins,
        runtime=problem.runtime,
    )
    search = LayoutSearch(
        prices=Prices(
            model=model,
            dtype=inputs.dtype,
            costs=problem.costs,
            bounds=problem.bounds,
            per_node=problem.per_node,
            runtime=problem.runtime,
            runs_ahead=problem.runs_ahead,
        ),
        batch=batch,
        pins=problem.pins,
        limit_bytes=problem.limit_bytes,
        host_bytes=problem.host_bytes,
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


def _layer(problem: LayoutProblem, search: LayoutSearch, best: Candidate) -> SolvedPlan:
    """Return the plan of one MoE layer in the layout.

    It has no memory limit: the search over layouts has checked that it fits.
    """
    trial, inputs = search.trial(best.layout), problem.inputs
    workload = trial.workload(best.setting)
    kind = workload.expert_parallel
    in_one = best.setting.one_chunk or problem.model.is_dense
    bounds = one_chunk_of(problem.bounds) if in_one else problem.bounds
    return solve_plan(
        inputs=replace(
            inputs,
            world_size=workload.world_size,
            tokens_per_rank=workload.tokens_per_rank,
            memory_limit_bytes=None,
            constraints={EXPERT_PARALLEL: kind} if kind == "tensor" else {},
        ),
        costs=problem.costs,
        resamples=problem.resamples,
        bounds=replace(bounds, strategy="none", dispatcher="flat"),
        device_memory_bytes=UNLIMITED,
        provenance=problem.provenance,
        num_nodes=trial.groups.experts.num_nodes,
    )


def _layer_memory(search: LayoutSearch, layer: Plan) -> Memory:
    """Return the MoE layer's memory with the states that a whole model keeps."""
    return layer_memory(
        workload=layer.workload,
        forward_degree=layer.pipeline.forward_degree,
        backward_degree=layer.pipeline.backward_degree,
        states=search.prices.state_bytes,
    )


def _chunks(search: LayoutSearch, best: Candidate) -> Chunks | None:
    """Return the chunks of the model states; None where a single rank holds all of them."""
    if best.chunks is not None:
        return best.chunks.chunks
    if best.layout.dp == 1 or not can_chunk(best.layout, search.prices):
        return None
    return search.trial(best.layout).chunker.replicated()


def _transformer(
    problem: LayoutProblem,
    best: Candidate,
    parts: tuple[Part, ...],
    binding: ModelBinding,
    stages: tuple[StageTime, ...],
) -> TransformerPlan:
    model, setting = problem.model, best.setting
    return TransformerPlan(
        num_layers=model.num_layers,
        moe_every=model.moe_every,
        micro_batch_sequences=setting.sequences,
        micro_batch_tokens=setting.sequences * model.length,
        num_micro_batches=setting.num_micro_batches,
        zero=setting.zero,
        recompute=setting.recompute,
        step_seconds=best.seconds,
        tokens_per_second_per_rank=problem.inputs.tokens_per_rank / best.seconds,
        memory=best.memory,
        parts=parts,
        binding=binding,
        stages=stages,
    )


def stages_of(search: LayoutSearch, best: Candidate) -> tuple[StageTime, ...]:
    """Return each stage's times of one micro-batch."""
    seconds, recompute = best.priced.seconds, best.setting.recompute
    sends = [*(hop.seconds for hop in best.hops), 0.0]
    return tuple(
        StageTime(
            num_blocks=stage.num_blocks,
            forward_seconds=seconds.forward(stage),
            backward_seconds=seconds.stage(stage, recompute=recompute) - seconds.forward(stage),
            send_seconds=send,
        )
        for stage, send in zip(search.prices.stages(best.layout.pp), sends, strict=True)
    )


def _losers(
    search: LayoutSearch, found: SearchResult, best_parts: Sequence[Part]
) -> Iterator[Alternative]:
    """Yield the next best layouts, and the best one with the other expert parallelism."""
    best, others = found.best[0], found.best[1:]
    kind = best.layout.expert_parallel
    other_way = [one for one in others if one.layout.expert_parallel != kind][:1]
    named = others[:NUM_LAYOUTS]
    if other_way and other_way[0] not in named:
        named = (*named[: NUM_LAYOUTS - 1], other_way[0])
    for one in named:
        parts = parts_of(one, search.prices.stages(one.layout.pp))
        lost = explain_layout_loss(other=one, parts=parts, best=best, best_parts=best_parts)
        yield _alternative(one, lost)


def _too_large(search: LayoutSearch, found: SearchResult) -> Iterator[Alternative]:
    for one in found.unfit[:NUM_UNFIT]:
        timed = _timed(search, one)
        if timed is not None:
            yield _alternative(timed, explain_unfit(one.memory, limit_bytes=search.limit_bytes))


def _timed(search: LayoutSearch, unfit: Unfit) -> Candidate | None:
    if unfit.setting.chunked:
        return None
    try:
        return search.trial(unfit.layout).timed(unfit.setting)
    except ProfileError:
        return None


def _alternative(one: Candidate, lost_because: str) -> Alternative:
    forward, backward = one.priced.moe.step.degrees
    return Alternative(
        forward_degree=forward,
        backward_degree=backward,
        order="dispatch_first",
        strategy="none",
        step_seconds=one.seconds,
        lost_because=lost_because,
        layout=one.layout,
        memory_bytes=one.memory.total_bytes,
    )


def _warnings(problem: LayoutProblem, found: SearchResult, solved: SolvedPlan) -> Iterator[str]:
    inputs, best = problem.inputs, found.best[0]
    if problem.provenance == "measured" and solved.ranked is not None:
        yield from layer_warnings(solved.ranked.best)  # the model's trust includes the layer's
    else:
        yield from solved.plan.warnings
    num_layouts = len(found.best) + len(found.unfit) + len(found.unpriced)
    yield from omission_warnings(found.unpriced, num_layouts)
    yield from runtime_warnings(
        zero=best.setting.zero and not best.setting.chunked, recompute=best.setting.recompute
    )
    yield from unmeasured_warnings(
        model=problem.model, dtype=inputs.dtype, costs=problem.costs, offload=best.setting.offload
    )
    if best.layout.expert_parallel == "tensor" or problem.provenance == "measured":
        yield from trust_warnings(
            trust=trust_of(best),
            provenance=problem.provenance,
            profile=inputs.profile,
            assumed_spread=False,
            doubts=doubt_warnings(doubts_in(best), command=profile_command(inputs, problem.model)),
        )
