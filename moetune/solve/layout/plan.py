"""Plan of a whole model: the fastest layout that fits, and the plan of its MoE layer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moetune.domain.errors import ProfileError
from moetune.domain.model_plan import Chunks, ModelBinding, Part, StageTime, TransformerPlan
from moetune.domain.plan import Alternative, Memory, Plan
from moetune.solve.layer.doubts import doubt_warnings, profile_command
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.plan import SolvedPlan, layer_warnings
from moetune.solve.layer.words import trust_warnings
from moetune.solve.layout.candidates import Candidate, SearchResult, Unfit
from moetune.solve.layout.choose import ChosenLayout, LayoutProblem, choose_layout
from moetune.solve.layout.chunked import can_chunk
from moetune.solve.layout.search import LayoutSearch
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

NUM_LAYOUTS = 6
"""Most layouts, of those that fit, that a plan lists after the best."""
NUM_UNFIT = 2
"""Most layouts that nearly fit that it lists, too."""


def solve_layout(problem: LayoutProblem) -> SolvedPlan:
    """Return the fastest layout that fits, with the plan of the MoE layer in it, and why.

    Raises:
        InputError: the ranks, the pins, the layers, heads, experts or sequences do not divide.
        InfeasiblePlanError: no layout fits into memory.
        ProfileError: every layout that fits needs an operation that was not measured.
    """
    chosen = choose_layout(problem)
    problem, search, found, layer = (
        chosen.problem, chosen.search, chosen.found, chosen.layer.plan
    )  # fmt: skip
    best = found.best[0]
    parts = parts_of(best, search.prices.stages(best.layout.pp))
    binding = binding_of(best, parts)
    plan = replace(
        layer,
        id=problem.inputs.plan_id,
        inputs=problem.inputs,
        layout=best.layout,
        memory=_layer_memory(search, layer),
        chunks=_chunks(search, best),
        decision=replace(layer.decision, why=_why(chosen, parts, binding)),
        alternatives=(
            *layer.alternatives,
            *_losers(search, found, parts),
            *_too_large(search, found),
        ),
        warnings=tuple(dict.fromkeys(_warnings(chosen))),
        transformer=replace(
            _transformer(problem, best, parts, binding, stages_of(search, best)),
            confidence=chosen.judge(problem.resamples),
        ),
    )
    return SolvedPlan(plan=plan, step=chosen.layer.step, ranked=None)


def _why(chosen: ChosenLayout, parts: Sequence[Part], binding: ModelBinding) -> str:
    """Return why the layout is the fastest, with the reasons of its chunks and of its MoE layer."""
    best, *others = chosen.found.best
    words = explain_layout(
        best=best, parts=parts, binding=binding, runner_up=others[0] if others else None
    )
    if best.chunks is not None:
        words += f" {explain_chunks(best.chunks, num_micro_batches=best.setting.num_micro_batches)}"
    if not chosen.problem.model.is_dense:
        words += f" In the MoE layer: {chosen.layer.plan.decision.why}"
    return words


def _layer_memory(search: LayoutSearch, layer: Plan) -> Memory:
    """Return the MoE layer's memory with the states that a whole model keeps."""
    return layer_memory(
        workload=layer.workload,
        forward_degree=layer.pipeline.forward_degree,
        backward_degree=layer.pipeline.backward_degree,
        states=search.prices.state_bytes,
    )


def _chunks(search: LayoutSearch, best: Candidate) -> Chunks | None:
    """Return the chunks of the model states; None where they are kept whole."""
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


def _warnings(chosen: ChosenLayout) -> Iterator[str]:
    problem, found, solved = chosen.problem, chosen.found, chosen.layer
    inputs, best = problem.inputs, found.best[0]
    if chosen.why_declined:
        yield chosen.why_declined
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
        model=problem.model, dtype=inputs.dtype, costs=problem.costs,
        accumulates=best.setting.num_micro_batches > 1 and best.chunks is None,
        offload=best.setting.offload,
    )  # fmt: skip
    if best.layout.expert_parallel == "tensor" or problem.provenance == "measured":
        yield from trust_warnings(
            trust=trust_of(best),
            provenance=problem.provenance,
            profile=inputs.profile,
            assumed_spread=False,
            doubts=doubt_warnings(
                doubts_in(best),
                command=profile_command(inputs, problem.launch, problem.model)
                if problem.provenance == "measured"
                else "",
            ),
        )
