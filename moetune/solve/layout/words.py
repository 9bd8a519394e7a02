"""Parts of a layout's step, the resource that binds it, and reasons in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from moetune.domain.cluster import HEADROOM
from moetune.domain.cost_keys import AttentionKey, RowsKey
from moetune.domain.costs import Costs, Doubt, Estimate, Trust, least_trust
from moetune.domain.errors import ProfileError
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.model_plan import ModelBinding, ModelMemory, Part, PartName
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.solve.chunks.choose import ChunkChoice
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.totals import doubts_of
from moetune.solve.layout.candidates import Batching, Candidate
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.stages import Stage

BINDING_OF: Mapping[PartName, ModelBinding] = MappingProxyType(
    {
        "gate": "computation",
        "first all_to_all": "all_to_all",
        "second all_to_all": "all_to_all",
        "MoE all_reduce": "all_reduce",
        "experts": "computation",
        "attention": "computation",
        "attention all_reduce": "all_reduce",
        "dense FFN": "computation",
        "FFN all_reduce": "all_reduce",
        "norms": "computation",
        "launches": "computation",
        "embedding": "computation",
        "head and loss": "computation",
        "vocabulary all_reduce": "all_reduce",
        "stage sends": "bubble",
        "gradient sums": "computation",
        "gradients": "gradients",
        "chunk transfers": "chunks",
        "optimizer": "computation",
        "bubble": "bubble",
    }
)

_ROUNDING = 1e-12
_IS_TIGHT = f"but leaves less than {HEADROOM * 100:g} % of the memory free"


def parts_of(candidate: Candidate, stages: tuple[Stage, ...]) -> tuple[Part, ...]:
    """Return the parts of the step on the slowest stage; they add up to it.

    Recomputation counts to the part that it repeats. The bubble is the time that the slowest
    stage waits for the others' first micro-batch, less the sends, which are a part of their own.
    """
    setting, times = candidate.setting, candidate.pipeline
    stage, count = stages[times.slowest], setting.num_micro_batches
    busy = count * candidate.priced.seconds.stage(stage, recompute=setting.recompute)
    share = times.busy_seconds / busy
    found: dict[PartName, tuple[float, float, float]] = {}
    for part, number, is_block in _cost_parts(candidate, stage):
        again = part.forward.seconds if is_block and setting.recompute else 0.0
        layer, forward, both = found.get(part.name, (0.0, 0.0, 0.0))
        found[part.name] = (
            max(layer, part.forward.seconds),
            forward + share * count * number * part.forward.seconds,
            both + share * count * number * (part.seconds + again),
        )
    idle = times.seconds - times.busy_seconds - times.send_seconds
    found["stage sends"] = (0.0, 0.0, times.send_seconds)
    found["bubble"] = (0.0, 0.0, idle if idle > _ROUNDING * times.seconds else 0.0)
    found["gradient sums"] = (0.0, 0.0, candidate.accumulation.seconds)
    found["gradients"] = (0.0, 0.0, candidate.gradients.seconds)
    found["chunk transfers"] = (0.0, 0.0, candidate.transfers.seconds)
    found["optimizer"] = (0.0, 0.0, candidate.optimizer.seconds)
    return tuple(
        Part(
            name=name,
            layer_seconds=found[name][0],
            forward_seconds=found[name][1],
            seconds=found[name][2],
            share=found[name][2] / candidate.seconds,
        )
        for name in BINDING_OF
        if name in found and found[name][2]
    )


def seconds_by_binding(parts: Iterable[Part]) -> Mapping[ModelBinding, float]:
    """Return the seconds of each kind of work, by the resource that binds it."""
    found: dict[ModelBinding, float] = {}
    for part in parts:
        found[BINDING_OF[part.name]] = found.get(BINDING_OF[part.name], 0.0) + part.seconds
    return found


def binding_of(candidate: Candidate, parts: Iterable[Part]) -> ModelBinding:
    """Return the largest kind of work; memory where recomputation or the like saves some."""
    setting = candidate.setting
    if setting.recompute or setting.one_chunk or setting.offload:
        return "memory"
    kinds = seconds_by_binding(parts)
    return max(kinds, key=kinds.__getitem__)


def trust_of(candidate: Candidate) -> Trust:
    """Return the least trust in the time of any part."""
    return least_trust(one.trust for one in _estimates(candidate))


def doubts_in(candidate: Candidate) -> tuple[Doubt, ...]:
    """Return what was not measured behind the time of any part."""
    return doubts_of(_estimates(candidate))


def _estimates(candidate: Candidate) -> list[Estimate]:
    backbone, moe = candidate.priced.backbone, candidate.priced.moe
    parts = (*backbone.attention, *backbone.ffn, *backbone.first, *backbone.last, *moe.parts)
    estimates = [one for part in parts for one in (part.forward, part.backward)]
    estimates += [*candidate.hops, candidate.accumulation, candidate.gradients]
    estimates += [candidate.optimizer, candidate.transfers]
    return [one for one in estimates if one.seconds]


def _cost_parts(candidate: Candidate, stage: Stage) -> Iterator[tuple[CostPart, int, bool]]:
    """Yield each part of the stage, its number there, and whether it belongs to a block."""
    backbone, moe = candidate.priced.backbone, candidate.priced.moe
    for parts, number, is_block in (
        (backbone.attention, stage.num_blocks, True),
        (backbone.ffn, stage.num_dense, True),
        (moe.parts, stage.num_moe, True),
        (backbone.first, int(stage.is_first), False),
        (backbone.last, int(stage.is_last), False),
    ):
        if number:
            yield from ((part, number, is_block) for part in parts)


BINDING_WORDS: dict[ModelBinding, str] = {
    "computation": "computation",
    "all_to_all": "all-to-alls",
    "all_reduce": "tensor-parallel all-reduces",
    "bubble": "filling and draining the stages",
    "gradients": "gradients' exchange",
    "chunks": "chunks' transfers",
    "memory": "memory",
}


def name_layout(layout: Layout) -> str:
    """Return "dp 8 · ep 4 · tp 1 · pp 4 · all_to_all"."""
    sizes = f"dp {layout.dp} · ep {layout.ep} · tp {layout.tp} · pp {layout.pp}"
    return f"{sizes} · {layout.expert_parallel}"


def name_setting(setting: Batching) -> str:
    """Return "2 sequences in 8 micro-batches, ZeRO"."""
    ways = ["ZeRO"] if setting.zero else []
    ways += ["states on the host"] if setting.offload else []
    ways += ["blocks recomputed"] if setting.recompute else []
    ways += ["one chunk"] if setting.one_chunk else []
    size, count = setting.sequences, setting.num_micro_batches
    text = f"{count} micro-batch{'' if count == 1 else 'es'} of {size} sequence"
    return ", ".join([text + ("" if size == 1 else "s"), *ways])


def explain_layout(
    *, best: Candidate, parts: Sequence[Part], binding: ModelBinding, runner_up: Candidate | None
) -> str:
    """Return the largest parts of the layout's step, and by how much it wins."""
    kinds = seconds_by_binding(parts)
    most = sorted(kinds, key=kinds.__getitem__, reverse=True)[:2]
    shares = " and ".join(
        f"{BINDING_WORDS[kind]} {format_share(kinds[kind] / best.seconds, digits=0)}"
        for kind in most
        if kinds[kind]
    )
    text = f"Layout {name_layout(best.layout)}: {shares} of a step."
    if binding == "memory":
        text += " Memory binds: a faster way of running it does not fit."
    if runner_up is None:
        return f"{text} The pins leave no other layout that fits."
    slower, other = runner_up.seconds / best.seconds - 1, name_layout(runner_up.layout)
    if slower < -TIE:
        return f"{text} {other} is {format_share(-slower)} faster, {_IS_TIGHT}."
    return f"{text} The next best, {other}, is {format_share(slower)} slower."


def explain_chunks(choice: ChunkChoice, *, num_micro_batches: int) -> str:
    """Return the location of states, the cache, and a micro-batch's transfers, hidden or not."""
    chunks, time = choice.chunks, choice.time
    where = "in shards, one on each replica"
    if chunks.offload:
        where = f"on the host ({format_bytes(choice.host_bytes)} a rank)"
    text = (
        f"Model states live {where}, parameters in {choice.num_chunks} chunks of "
        f"{format_bytes(chunks.chunk_bytes)}; the cache has {choice.num_places} places "
        f"({format_bytes(chunks.cache_bytes)}). "
    )
    text += (
        f"A micro-batch gathers {choice.num_gathers:g} chunks "
        f"({format_bytes(choice.gathered_bytes)}) and reduces "
        f"{format_bytes(choice.reduced_bytes)} of gradients: of "
        f"{format_seconds(time.transfer_seconds)} of transfers "
        f"{format_seconds(time.exposed_seconds)} are not hidden"
    )
    added = time.added_seconds(num_micro_batches)
    if added:
        text += f", and {format_seconds(added)} of the optimizer's step"
    if chunks.offload and added < time.update_seconds:
        text += ". Chunks are stepped within the backward pass (`step_in_backward=True`)"
    return f"{text}."


def explain_layout_loss(
    *, other: Candidate, parts: Sequence[Part], best: Candidate, best_parts: Sequence[Part]
) -> str:
    """Return by how much a layout is slower, and the work that takes longer."""
    slower = other.seconds / best.seconds - 1
    if slower < -TIE:
        return f"-{-100 * slower:.1f} %, {_IS_TIGHT}"
    if slower <= TIE:
        return "as fast"
    mine, its = seconds_by_binding(parts), seconds_by_binding(best_parts)
    more = {kind: seconds - its.get(kind, 0.0) for kind, seconds in mine.items()}
    most = max(more, key=more.__getitem__)
    again = ", and its blocks are recomputed" if other.setting.recompute else ""
    return (
        f"+{100 * slower:.1f} %: {format_seconds(more[most])} more of {BINDING_WORDS[most]}{again}"
    )


def explain_unfit(memory: ModelMemory, *, limit_bytes: int) -> str:
    """Return by how much a layout is too large."""
    return f"does not fit: {format_bytes(memory.total_bytes - limit_bytes)} over the limit"


def name_memory(memory: ModelMemory) -> str:
    """Return "parameters 2.1 GiB, gradients …"."""
    return (
        f"parameters {format_bytes(memory.parameter_bytes)}, "
        f"gradients {format_bytes(memory.gradient_bytes)}, "
        f"optimizer {format_bytes(memory.optimizer_bytes)}, "
        f"activations {format_bytes(memory.activation_bytes)}, "
        f"buffers {format_bytes(memory.buffer_bytes)}"
    )


def omission_warnings(
    unpriced: Sequence[tuple[Layout, ProfileError]], num_layouts: int
) -> Iterator[str]:
    """Yield a warning where layouts lack a measured operation."""
    if unpriced:
        yield (
            f"{len(unpriced)} of {num_layouts} layouts are omitted, as not all was measured: "
            f"{unpriced[0][1].what}; --allow-modelled estimates them"
        )


def runtime_warnings(*, zero: bool, recompute: bool) -> Iterator[str]:
    """Yield a warning where the plan needs features that moetune's own stages lack."""
    wanted = (("shard optimizer states", zero), ("recompute blocks", recompute))
    missing = " and ".join(words for words, is_wanted in wanted if is_wanted)
    if missing:
        yield f"moetune's stages do not {missing} themselves: the plan is for a runtime that does"


def unmeasured_warnings(
    *,
    model: Transformer,
    dtype: str,
    costs: Costs,
    accumulates: bool = False,
    offload: bool = False,
) -> Iterator[str]:
    """Yield warnings that name the operations that were not measured.

    Args:
        accumulates: gradients of several micro-batches are added up.
        offload: the optimizer runs on the host.
    """
    names = {"norm": "norms", "cross_entropy": "the loss", "adam": "the optimizer",
             model.moe.activation: "activations"}  # fmt: skip
    if accumulates:
        names["accumulate"] = "sums of the micro-batches' gradients"
    if offload:
        update = names.pop("adam")
        if costs.copy_mode != "inline" or not costs.knows(RowsKey("adam", dtype)):
            names["host_adam"] = f"{update} on the host"
    absent = [words for op, words in names.items() if not costs.knows(RowsKey(op, dtype))]
    if absent:
        yield f"not measured, and not counted in the step: {', '.join(absent)}"
    if not costs.knows(AttentionKey(dtype, model.length, model.num_heads, model.head_dim)):
        yield "attention was not measured: two GEMMs of its size stand in for it"
