"""A training plan as sections: the layout, its time by part, its memory, and the next layouts."""

from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.chunks import Chunks
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingAnswer, TrainingDocument, TrainingLayout
from moetune.domain.units import format_bytes
from moetune.report.section import (
    EMPTY,
    Cell,
    Section,
    Table,
    facts,
    percent,
    plural,
    seconds_span,
    sentence,
)
from moetune.solve.joint.search import NOISE
from moetune.workflows.views.decision import how_sure_of_training
from moetune.workflows.views.first_words import binding_words, origin_section, saving_words
from moetune.workflows.views.words import (
    largest_first,
    model_placement_words,
    speed_cell,
    speed_words,
)

_FRONT_NOTE = (
    "Both as against the line above; steps that save less than "
    f"{percent(NOISE, digits=0)} are omitted."
)


def training_sections(plan: TrainingDocument) -> Iterator[Section]:
    """Yield the sections of a training plan."""
    best = plan.best
    yield origin_section(plan)
    yield _decision(plan)
    yield Section(name="time", title="Time of a step, on the slowest pipeline rank",
                  tables=(time_table(best),))  # fmt: skip
    yield Section(name="memory", title=f"Memory of pipeline rank {best.memory.rank}",
                  tables=tuple(_memory_parts(best)))  # fmt: skip
    if plan.alternatives:
        yield Section(name="alternatives", title="The next layouts", tables=(_others(plan),))
    if plan.front:
        yield Section(
            name="front", title="The fastest layout for each memory", tables=(_front(plan),)
        )


def _decision(plan: TrainingDocument) -> Section:
    inputs, best = plan.inputs, plan.best
    return Section(
        name="layout",
        title=f"{inputs.model} on {inputs.world_size} ranks: {best.words}",
        paragraphs=(
            binding_words(best),
            *saving_words(plan),
            how_sure_of_training(plan),
            *model_placement_words(plan),
            *map(sentence, plan.warnings),
        ),
        tables=(facts("layout", [*_facts(plan)], header=("layout", "")),),
    )


def _facts(plan: TrainingDocument) -> Iterator[tuple[str, str]]:
    best, sure = plan.best, plan.confidence
    predicted, layout = best.predicted, best.layout
    span = seconds_span(predicted.step_seconds, sure.p05_step_seconds, sure.p95_step_seconds)
    yield "step", span
    yield "tokens per second and device", f"{predicted.tokens_per_second_per_device:,.0f}"
    yield "model FLOP/s per device", speed_words(predicted.throughput, "")
    yield "memory per device", _memory(plan)
    yield "recompute", _recomputed(best)
    yield "dispatcher", layout.dispatcher
    yield "overlap of exchanges", _overlap(best)
    yield "in host memory", _offloaded(best)
    if plan.chunks is not None:
        yield "states", _chunks(plan.chunks)
    yield "CUDA graphs", _graphs(best)
    yield "optimizer", f"{plan.inputs.optimizer}, ZeRO-{layout.zero}"
    yield from _pipeline(layout)
    yield "runtime", plan.inputs.runtime
    yield "numbers", plan.trust


def _chunks(chunks: Chunks) -> str:
    where = "in host memory" if chunks.offload else "in shards, one on each replica"
    places = plural(chunks.cache_bytes // chunks.chunk_bytes, "chunk")
    return (
        f"chunks of {format_bytes(chunks.chunk_bytes)} {where}, {places} at a time in the cache: "
        "moetune.shard"
    )


def _recompute(layout: TrainingLayout) -> str:
    return ", ".join(layout.recompute)


def _recomputed(best: TrainingAnswer) -> str:
    """Return the modules that the layout recomputes, or what a runtime does without being told."""
    if best.layout.recompute == ("none",) and best.predicted.parts.get("recompute"):
        return "none; activations of experts are not kept, and computed again"
    return _recompute(best.layout)


def _graphs(best: TrainingAnswer) -> str:
    saved, step = best.predicted.saved_by_graphs_seconds, best.predicted.step_seconds
    if saved <= 0:
        return str(best.layout.cuda_graphs)
    share = percent(saved / (step + saved))
    return f"{best.layout.cuda_graphs}: saves {Cell.seconds(saved).text}, {share} of the step"


def _overlap(best: TrainingAnswer) -> str:
    overlap, degree = str(best.layout.overlap), best.layout.degree
    if degree is not None:
        overlap += f" ({degree.forward} forward, {degree.backward} backward)"
    saved, step = best.predicted.saved_by_overlap_seconds, best.predicted.step_seconds
    if saved <= 0:
        return overlap
    share = percent(saved / (step + saved))
    return f"{overlap}: saves {Cell.seconds(saved).text}, {share} of the step"


def _offloaded(best: TrainingAnswer) -> str:
    what = host_words(best.layout)
    return f"{what}, {format_bytes(best.memory.host_bytes)} a device" if what else "nothing"


def host_words(layout: TrainingLayout | FoldedLayout) -> str:
    """Return "activations of 25 % of the blocks and 50 % of the optimizer"; "" for nothing."""
    kept = (
        (layout.offload_activations, "activations of {} of the blocks"),
        (layout.offload_optimizer, "{} of the optimizer"),
    )
    return " and ".join(words.format(percent(share, digits=0)) for share, words in kept if share)


def decision_words(words: str, layout: TrainingLayout | FoldedLayout) -> str:
    """Return what a layout does, in a sentence or two.

    Args:
        words: its sizes.
    """
    again = ", ".join(one for one in layout.recompute if one != "none") or "nothing"
    overlap = "no overlap" if layout.overlap == "none" else f"overlap by {layout.overlap}"
    kept = host_words(layout)
    on_host = f" Keep {kept} in host memory." if kept else ""
    return (
        f"Lay it out as {words}; recompute {again}, exchange with {layout.dispatcher} and "
        f"{overlap}.{on_host}"
    )


def _pipeline(layout: TrainingLayout) -> list[tuple[str, str]]:
    if layout.pp == 1:
        return []
    return [("schedule", str(layout.schedule)), ("stages", str(layout.stages))]


def _memory(plan: TrainingDocument) -> str:
    peak = Cell.size(plan.best.memory.peak_bytes).text
    return f"{peak} of {Cell.size(plan.inputs.memory_limit_bytes).text}"


def time_table(best: TrainingAnswer) -> Table:
    """Return the parts of a step, the longest first."""
    parts = sorted(best.predicted.parts.items(), key=lambda item: -item[1])
    step = best.predicted.step_seconds
    return Table(
        name="time",
        header=("part", "time", "share"),
        rows=tuple(
            (Cell.words(name), Cell.seconds(seconds), Cell.share(seconds / step))
            for name, seconds in parts
            if seconds > 0
        ),
    )


def _memory_parts(best: TrainingAnswer) -> Iterator[Table]:
    memory = best.memory
    for name, first, sizes in (
        ("memory", "part", memory.parts), ("activations", "activations of", memory.activations),
    ):  # fmt: skip
        yield Table(
            name=name,
            header=(first, "memory"),
            rows=tuple(
                (Cell.words(one), Cell.size(round(size))) for one, size in largest_first(sizes)
            ),
        )


def _front(plan: TrainingDocument) -> Table:
    """Return the front with what each layout costs and saves as against the one before."""
    limit, rows = plan.inputs.memory_limit_bytes, []
    for before, one in zip((None, *plan.front), plan.front, strict=False):
        peak, step = one.memory.peak_bytes, one.predicted.step_seconds
        more, saved = EMPTY, EMPTY
        if before is not None:
            more = Cell.size(peak - before.memory.peak_bytes)
            saved = Cell.share(1 - step / before.predicted.step_seconds)
        on_host = host_words(one.layout)
        rows.append(
            (
                replace(Cell.size(peak), mark="" if peak <= limit else "suspect"),
                Cell.seconds(step), more, saved,
                Cell.words(f"{one.words}; on the host {on_host}" if on_host else one.words),
                Cell.words(_recompute(one.layout)), Cell.words(one.layout.overlap),
            )
        )  # fmt: skip
    return Table(
        name="front",
        header=("memory", "step", "costs", "saves", "layout", "recompute", "overlap"),
        rows=tuple(rows),
        notes=(_FRONT_NOTE,),
    )


def _others(plan: TrainingDocument) -> Table:
    best = plan.best.predicted.step_seconds
    return Table(
        name="alternatives",
        header=("layout", "recompute", "overlap", "schedule", "step", "slower", "FLOP/s", "memory"),
        rows=tuple(
            (
                Cell.words(one.words),
                Cell.words(_recompute(one.layout)),
                Cell.words(one.layout.overlap),
                Cell.words(str(one.layout.schedule)),
                Cell.seconds(one.predicted.step_seconds),
                Cell.share(one.predicted.step_seconds / best - 1, sign=True),
                speed_cell(one.predicted.throughput),
                Cell.size(one.memory.peak_bytes),
            )
            for one in plan.alternatives
        ),
        wide=("FLOP/s",),
    )
