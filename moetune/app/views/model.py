"""A training plan as sections: the layout, its time and memory, the next layouts, and why."""

from collections.abc import Iterator
from dataclasses import replace

from moetune.app.subjects.model import ModelSubject
from moetune.app.views.memory import memory_section
from moetune.domain.chunks import Chunks
from moetune.domain.pipeline import stage_words
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.domain.units import (
    format_bytes,
    format_chunks,
    format_degree,
    format_seconds,
    format_share,
)
from moetune.report.model_words import (
    binding_words,
    decision_words,
    host_words,
    how_sure,
    origin_words,
    packing_words,
    placement_words,
    saving_words,
    tuning_words,
)
from moetune.report.section import (
    EMPTY,
    Cell,
    Highlight,
    Section,
    Table,
    facts,
    plural,
    seconds_span,
    sentence,
)
from moetune.report.words import (
    Reasons,
    parts_table,
    plan_scope,
    run_highlights,
    run_words,
    speed_cell,
    speed_words,
    suspect_words,
)
from moetune.solve.model.search import NOISE

_FRONT_NOTE = (
    "Both as against the line above; steps that save less than "
    f"{format_share(NOISE, digits=0)} are omitted."
)
_TIES = f"Of steps within {format_share(NOISE, digits=0)} the simplest layout is taken."
_MEAN = "Parts are compared on the mean of the pipeline ranks."


def model_sections(subject: ModelSubject) -> Iterator[Section]:
    """Yield the sections of a training plan, the answer first."""
    plan = subject.plan
    yield _answer(subject)
    yield _memory(plan)
    yield _time(subject)
    settings = facts("layout", _settings(plan), header=("layout", ""))
    yield Section(name="settings", title="Layout and settings", tables=(settings,))
    if plan.alternatives:
        yield Section(name="alternatives", title="The next layouts", tables=(_alternatives(plan),))
    if plan.front:
        yield Section(
            name="front", title="The fastest layout for each memory", tables=(_front(plan),),
        )  # fmt: skip


def _answer(subject: ModelSubject) -> Section:
    plan = subject.plan
    peak, limit = plan.memory.peak_bytes, plan.inputs.memory_limit_bytes
    tokens, speed = plan.predicted.tokens_per_second_per_device, speed_words(plan.throughput, "")
    span = seconds_span(plan.step_seconds, *plan.range_seconds)
    low, high = map(format_seconds, plan.range_seconds)
    return Section(
        name="answer",
        title=plan.name,
        scope=plan_scope(plan, profile=subject.profile),
        doubts=suspect_words(plan),
        paragraphs=(
            *origin_words(plan),
            *tuning_words(plan.inputs.tuning, plan.trained),
            *packing_words(plan.inputs.packing, plan.inputs.seq),
            decision_words(plan.words, plan.layout),
            *placement_words(plan),
            binding_words(plan.best),
            *saving_words(plan),
            how_sure(plan),
        ),
        summary=(
            f"One step: {span}, {tokens:,.0f} tokens a second of each device, {speed}; "
            f"{format_bytes(peak)} of {format_bytes(limit)} of its memory."
            f"{''.join(f' {words}' for words in run_words(plan.inputs.budget, plan.run))}"
        ),
        notes=tuple(map(sentence, plan.warnings)),
        highlights=(
            Highlight("One step", Cell.seconds(plan.step_seconds), f"{low} to {high}"),
            Highlight("Tokens a second", Cell.count(tokens), f"of each device, {speed}"),
            Highlight(
                "Memory of a device", Cell.size(peak),
                f"of {format_bytes(limit)}, {format_share(peak / limit, digits=0)}",
            ),
            *run_highlights(plan.run),
        ),
    )  # fmt: skip


def _settings(plan: TrainingDocument) -> Iterator[tuple[str, str]]:
    best, layout, step = plan.best, plan.layout, plan.predicted
    recompute = layout.recompute_words
    if not layout.recompute and step.parts.get("recompute"):  # as a runtime does without a flag
        recompute = "none; activations of experts are not kept, and computed again"
    yield "recompute", recompute
    yield "dispatcher", layout.dispatcher
    overlap = str(layout.overlap)
    if layout.degree is not None:
        overlap += f" ({format_degree(layout.degree.forward, layout.degree.backward)})"
    yield "overlap of exchanges", f"{overlap}{_saves(best, step.saved_by_overlap_seconds)}"
    host = f", {format_bytes(best.memory.host_bytes)} a device"
    yield (
        "in host memory",
        f"{offloaded}{host}" if (offloaded := host_words(layout)) else "nothing",
    )
    if plan.chunks is not None:
        yield "states", _chunks(plan.chunks)
    yield "CUDA graphs", f"{layout.cuda_graphs}{_saves(best, step.saved_by_graphs_seconds)}"
    is_modelled = plan.inputs.optimizer == "muon"  # its iterations, as bfloat16 products
    modelled = "; its Newton-Schulz iterations are modelled" if is_modelled else ""
    yield "optimizer", f"{plan.inputs.optimizer}, ZeRO-{layout.zero}{modelled}"
    if plan.trained is not None:
        yield "trains", plan.inputs.tuning.words
    if layout.pp > 1:
        yield "schedule", str(layout.schedule)
        yield "stages", stage_words(layout.stages or ())
    yield "runtime", plan.inputs.runtime
    yield "numbers", plan.trust


def _chunks(chunks: Chunks) -> str:
    where = "in host memory" if chunks.offload else "in shards, one on each replica"
    places = plural(chunks.cache_bytes // chunks.chunk_bytes, "chunk")
    size = format_bytes(chunks.chunk_bytes)
    return f"chunks of {size} {where}, {places} at a time in the cache: moetune.shard"


def _saves(best: TrainingAnswer, seconds: float) -> str:
    if seconds <= 0:
        return ""
    share = format_share(seconds / (best.predicted.step_seconds + seconds))
    return f": saves {format_seconds(seconds)}, {share} of the step"


def _time(subject: ModelSubject) -> Section:
    plan = subject.plan
    step, parts = plan.step_seconds, plan.predicted.parts
    kinds = (f"{name} {format_share(seconds / step)}" for name, seconds in subject.kinds.items())
    return Section(
        name="terms", title="Time of a step, on the slowest pipeline rank",
        paragraphs=(f"Of the step: {', '.join(kinds)}.",),
        tables=(parts_table("time", ("part", "time"), parts, Cell.seconds),),
    )  # fmt: skip


def _memory(plan: TrainingDocument) -> Section:
    memory, limit = plan.memory, format_bytes(plan.inputs.memory_limit_bytes)
    peak = f"{format_bytes(memory.peak_bytes)} of {limit}"
    return memory_section(memory, title=f"Memory of pipeline rank {memory.rank}: {peak}")


def _front(plan: TrainingDocument) -> Table:
    """Return the front, with the memory that each layout adds and the time that it saves."""
    limit, rows = plan.inputs.memory_limit_bytes, []
    for before, answer in zip((None, *plan.front), plan.front, strict=False):
        peak, step = answer.memory.peak_bytes, answer.predicted.step_seconds
        more, saved = EMPTY, EMPTY
        if before is not None:
            more = Cell.size(peak - before.memory.peak_bytes)
            saved = Cell.share(1 - step / before.predicted.step_seconds)
        on_host = host_words(answer.layout)
        rows.append(
            (
                replace(Cell.size(peak), mark="" if peak <= limit else "suspect"),
                Cell.seconds(step), more, saved,
                Cell.words(f"{answer.words}; on the host {on_host}" if on_host else answer.words),
                Cell.words(answer.layout.recompute_words), Cell.words(answer.layout.overlap),
            )
        )  # fmt: skip
    return Table(
        name="front",
        header=("memory", "step", "costs", "saves", "layout", "recompute", "overlap"),
        rows=tuple(rows),
        notes=(_FRONT_NOTE,),
    )


def _alternatives(plan: TrainingDocument) -> Table:
    return Table.of(
        "alternatives",
        plan.alternatives,
        {
            "layout": lambda answer: answer.words,
            "recompute": lambda answer: answer.layout.recompute_words,
            "overlap": lambda answer: answer.layout.overlap,
            "schedule": lambda answer: str(answer.layout.schedule),
            "step": lambda answer: Cell.seconds(answer.predicted.step_seconds),
            "slower": lambda answer: Cell.share(
                answer.predicted.step_seconds / plan.step_seconds - 1, sign=True
            ),
            "FLOP/s": lambda answer: speed_cell(answer.predicted.throughput),
            "memory": lambda answer: Cell.size(answer.memory.peak_bytes),
        },
        wide=("FLOP/s",),
    )


def model_reasons(subject: ModelSubject) -> Reasons:
    """Return what an explanation shows of a training plan."""
    plan, best = subject.plan, subject.plan.best
    layouts = (best, *plan.alternatives)
    is_piped = any(row.layout.pp > 1 for row in layouts)
    is_tied = any(row.predicted.step_seconds < plan.step_seconds for row in layouts)
    return Reasons(
        decision=decision_words(plan.words, plan.layout),
        placement=tuple(placement_words(plan)),
        why=(
            *tuning_words(plan.inputs.tuning, plan.trained),
            *packing_words(plan.inputs.packing, plan.inputs.seq),
            binding_words(best),
            *_hidden(best),
            *saving_words(plan),
        ),
        sure=how_sure(plan),
        pins=tuple(plan.inputs.pins.flags.items()),
        terms=(_time(subject), _memory(plan), *_placement(plan)),
        notes=(*((_MEAN,) if is_piped else ()), *((_TIES,) if is_tied else ())),
    )


def _placement(plan: TrainingDocument) -> Iterator[Section]:
    if plan.placement is None:
        return
    table = Table.of(
        "placement",
        enumerate(plan.placement.layers, start=1),
        {
            "layer of experts": lambda row: Cell.count(row[0]),
            "model's order": lambda row: _skew(row[1].natural_skew),
            "placed": lambda row: _skew(row[1].placed_skew),
            "at least": lambda row: _skew(row[1].least_skew),
        },
    )
    title = "Rows of the fullest rank over the mean"
    yield Section(name="placement", title=title, tables=(table,))


def _skew(skew: float) -> Cell:
    return Cell(text=f"{skew:.3f}", value=skew)


def _hidden(best: TrainingAnswer) -> Iterator[str]:
    saved, step = best.predicted.saved_by_overlap_seconds, best.predicted.step_seconds
    if saved > 0:
        words = "Another micro-batch's computation hides exchanges"
        if (degree := best.layout.degree) is not None:
            chunks = format_chunks(degree.forward, degree.backward)
            words = f"Exchanges run in {chunks} while experts compute other chunks"
        share = format_share(saved / (step + saved))
        yield (
            f"{words}: that saves {format_seconds(saved)}, {share} of the "
            f"{format_seconds(step + saved)} without it."
        )
