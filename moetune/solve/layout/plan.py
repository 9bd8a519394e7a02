"""What would fit where no layout does: fewer pins, or more ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import EXPERT_PARALLEL, Bounds, LayoutPins
from moetune.domain.costs import Costs
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layout import Layout
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
from moetune.solve.layer.memory import layer_memory, limit_of
from moetune.solve.layer.plan import SolvedPlan, solve_plan
from moetune.solve.layer.strategies import UNLIMITED
from moetune.solve.layer.words import beware
from moetune.solve.layout.chunked import can_chunk, can_offload
from moetune.solve.layout.search import Candidate, LayoutSearch, SearchResult, Unfit, try_all
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.layout.words import (
    binding_of,
    explain_chunks,
    explain_layout,
    explain_layout_loss,
    explain_unfit,
    left_out,
    not_measured,
    not_ours,
    nothing_fits,
    parts_of,
    trust_of,
)
from moetune.solve.model.prices import Prices, one_chunk_of
from moetune.solve.model.runtime import MOETUNE, TargetRuntime

MOST_DOUBLINGS = 8
COPIES = "states on the host have no price, the profile has no copies: run `moetune profile`"


def what_would_fit(search: LayoutSearch, *, inputs: PlanInputs) -> str:
    """Return the change that leaves the most as it is: a pin, then the number of ranks."""
    pins, costs = search.pins, search.prices.costs
    if pins.offload is False and _smallest(
        replace(search, pins=replace(pins, offload=None)), inputs
    ):
        return "let model states live on the host: leave --no-offload away"
    if pins.zero is False and _smallest(replace(search, pins=replace(pins, zero=None)), inputs):
        return "shard the model states: --zero"
    found = _smallest(replace(search, pins=LayoutPins()), inputs)
    if pins != LayoutPins() and found is not None:
        axes = " ".join(f"--{axis} {getattr(found, axis)}" for axis in ("dp", "ep", "tp", "pp"))
        return f"nearest: {axes} --expert-parallel {found.expert_parallel}"
    for doubling in range(1, MOST_DOUBLINGS + 1):
        ranks = inputs.world_size * 2**doubling
        if _smallest(search, replace(inputs, world_size=ranks)) is not None:
            copies = "" if can_offload(costs) else f"; {COPIES}"
            return f"nearest: {ranks} ranks instead of {inputs.world_size}, or more memory{copies}"
    return "no number of ranks fits: allow more memory, or take a shorter --seq"


def _smallest(search: LayoutSearch, inputs: PlanInputs) -> Layout | None:
    """Return the layout with the least memory, None where it does not fit either."""
    model = search.prices.model
    try:
        batch = whole_batch(
            model=model, tokens_per_rank=inputs.tokens_per_rank, world_size=inputs.world_size
        )
        layouts = find_layouts(
            model=model, world_size=inputs.world_size, batch=batch, pins=search.pins
        )
    except InputError:
        return None
    trials = (replace(search, batch=batch).trial(layout) for layout in layouts)
    best = min((trial.smallest() for trial in trials), key=lambda one: one.memory.total_bytes)
    return best.layout if best.memory.total_bytes <= search.limit_bytes else None


NUM_LAYOUTS = 6
"""Layouts beside the best that a plan names, of those that fit."""
NUM_UNFIT = 2
"""Layouts that do not fit, but nearly, that it names besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProblem:
    """What is asked, and what is known of the machine.

    Args:
        resamples: refits of the profile's measurements; may be empty.
        bounds: of the MoE layer's chunks.
        per_node: devices of a node.
        device_memory_bytes: the limit where the inputs set none.
        host_memory_bytes: of one node; None where unknown.
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

    @property
    def host_bytes(self) -> int | None:
        """What one rank may take of its host."""
        if self.host_memory_bytes is None:
            return None
        return self.host_memory_bytes // min(self.per_node, self.inputs.world_size)

    @property
    def limit_bytes(self) -> int:
        """What the model may take of a device."""
        return limit_of(self.inputs, device_memory_bytes=self.device_memory_bytes)


def solve_layout(question: LayoutProblem) -> SolvedPlan:
    """Return the fastest layout that fits, with the plan of the MoE layer in it, and why.

    Raises:
        InputError: the ranks, the pins, the layers, heads, experts or sequences do not divide.
        InfeasiblePlanError: no layout fits into memory.
        ProfileError: no layout that fits has a price: the profile lacks an operation.
    """
    search, found = search_layouts(question)
    best = found.best[0]
    parts = parts_of(best, search.prices.stages(best.layout.pp))
    binding = binding_of(best, parts)
    solved = _layer(question, search, best)
    layer = solved.plan
    words = explain_layout(
        best=best,
        parts=parts,
        binding=binding,
        runner_up=found.best[1] if len(found.best) > 1 else None,
    )
    if best.chunks is not None:
        words += f" {explain_chunks(best.chunks, num_micro_batches=best.setting.num_micro_batches)}"
    if not question.model.is_dense:
        words += f" In the MoE layer: {layer.decision.why}"
    plan = replace(
        layer,
        id=question.inputs.plan_id,
        inputs=question.inputs,
        layout=best.layout,
        memory=_layer_memory(search, layer),
        chunks=_chunks(search, best),
        decision=replace(layer.decision, why=words),
        alternatives=(
            *layer.alternatives,
            *_losers(search, found, parts),
            *_too_large(search, found),
        ),
        warnings=tuple(dict.fromkeys((*layer.warnings, *_doubts(question, found, best)))),
        transformer=_transformer(question, best, parts, binding, stages_of(search, best)),
    )
    return SolvedPlan(plan=plan, step=solved.step, ranked=None)


def search_layouts(question: LayoutProblem) -> tuple[LayoutSearch, SearchResult]:
    """Return all layouts in the order of their time; at least one fits.

    Raises:
        InputError, InfeasiblePlanError, ProfileError: as `solve_layout`.
    """
    inputs, model = question.inputs, question.model
    batch = whole_batch(
        model=model, tokens_per_rank=inputs.tokens_per_rank, world_size=inputs.world_size
    )
    layouts = find_layouts(
        model=model,
        world_size=inputs.world_size,
        batch=batch,
        pins=question.pins,
        runtime=question.runtime,
    )
    search = LayoutSearch(
        prices=Prices(
            model=model,
            dtype=inputs.dtype,
            costs=question.costs,
            bounds=question.bounds,
            per_node=question.per_node,
            runtime=question.runtime,
            runs_ahead=question.runs_ahead,
        ),
        batch=batch,
        pins=question.pins,
        limit_bytes=question.limit_bytes,
        host_bytes=question.host_bytes,
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


def _layer(question: LayoutProblem, search: LayoutSearch, best: Candidate) -> SolvedPlan:
    """Return the plan of one MoE layer in the layout, for the layer that runs there.

    Its memory is no bound: the search over layouts has seen that it fits.
    """
    trial, inputs = search.trial(best.layout), question.inputs
    workload = trial.workload(best.setting)
    kind = workload.expert_parallel
    in_one = best.setting.one_chunk or question.model.is_dense
    bounds = one_chunk_of(question.bounds) if in_one else question.bounds
    return solve_plan(
        inputs=replace(
            inputs,
            world_size=workload.world_size,
            tokens_per_rank=workload.tokens_per_rank,
            memory_limit_bytes=None,
            constraints={EXPERT_PARALLEL: kind} if kind == "tensor" else {},
        ),
        costs=question.costs,
        resamples=question.resamples,
        bounds=replace(bounds, strategy="none"),
        device_memory_bytes=UNLIMITED,
        provenance=question.provenance,
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
    """Return how states are kept in chunks; None on one rank that has room for all of them."""
    if best.chunks is not None:
        return best.chunks.chunks
    if best.layout.dp == 1 or not can_chunk(best.layout, search.prices):
        return None
    return search.trial(best.layout).chunker.replicated()


def _transformer(
    question: LayoutProblem,
    best: Candidate,
    parts: tuple[Part, ...],
    binding: ModelBinding,
    stages: tuple[StageTime, ...],
) -> TransformerPlan:
    model, setting = question.model, best.setting
    return TransformerPlan(
        num_layers=model.num_layers,
        moe_every=model.moe_every,
        micro_batch_sequences=setting.sequences,
        micro_batch_tokens=setting.sequences * model.length,
        num_micro_batches=setting.num_micro_batches,
        zero=setting.zero,
        recompute=setting.recompute,
        step_seconds=best.seconds,
        tokens_per_second_per_rank=question.inputs.tokens_per_rank / best.seconds,
        memory=best.memory,
        parts=parts,
        binding=binding,
        stages=stages,
    )


def stages_of(search: LayoutSearch, best: Candidate) -> tuple[StageTime, ...]:
    """Return what each stage takes of a micro-batch."""
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
    """Yield the next best layouts, and the best one that shares experts in the other way."""
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


def _doubts(question: LayoutProblem, found: SearchResult, best: Candidate) -> Iterator[str]:
    inputs = question.inputs
    num_layouts = len(found.best) + len(found.unfit) + len(found.unpriced)
    yield from left_out(found.unpriced, num_layouts)
    yield from not_ours(
        zero=best.setting.zero and not best.setting.chunked, recompute=best.setting.recompute
    )
    yield from not_measured(
        model=question.model, dtype=inputs.dtype, costs=question.costs, offload=best.setting.offload
    )
    if best.layout.expert_parallel == "tensor" or question.provenance == "measured":
        yield from beware(
            trust=trust_of(best),
            provenance=question.provenance,
            profile=inputs.profile,
            assumed_spread=False,
        )
