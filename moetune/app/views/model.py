"""A training plan as sections: the layout, its time and memory, the next ones, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moetune.app.subjects.model import ModelSubject, kinds_of
from moetune.app.views.model_words import (
    binding_words,
    decision_words,
    host_words,
    how_sure_of_training,
    model_placement_words,
    origin_words,
    saving_words,
)
from moetune.app.views.words import (
    Reasons,
    largest_first,
    plan_scope,
    speed_cell,
    speed_words,
    suspect_words,
)
from moetune.domain.chunks import Chunks
from moetune.domain.pipeline import stage_words
from moetune.domain.placement import LayerPlacement
from moetune.domain.training_document import TrainingAnswer, TrainingDocument
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.plan_figures import (
    Option,
    memory_parts_figure,
    pareto_figure,
    stacked_figure,
)
from moetune.report.section import (
    EMPTY,
    Cell,
    Figure,
    Highlight,
    Section,
    Table,
    facts,
    percent,
    plural,
    seconds_span,
    sentence,
)
from moetune.solve.model.pins import pin_flags
from moetune.solve.model.search import NOISE

_SLOW, _LARGE = 3.0, 1.25
"""Multiples of a plan's step, and of its limit of memory, up to which figures show a front."""
_FRONT_NOTE = (
    "Both as against the line above; steps that save less than "
    f"{percent(NOISE, digits=0)} are omitted."
)
_TIES = f"Of steps within {percent(NOISE, digits=0)} of each other the simpler layout is taken."
_MEAN = "Parts are compared on the mean of the pipeline ranks."


def training_sections(plan: TrainingDocument) -> Iterator[Section]:
    """Yield the sections of a training plan, the answer first."""
    best, memory = plan.best, plan.memory
    yield _answer(plan)
    yield Section(
        name="memory", title=f"Memory of pipeline rank {memory.rank}",
        tables=tuple(_memory_parts(best)), figures=(_memory_figure(plan),),
    )  # fmt: skip
    yield Section(
        name="time", title="Time of a step, on the slowest pipeline rank",
        tables=(_time_table(best),), figures=tuple(training_figures({"this plan": plan})),
    )  # fmt: skip
    yield Section(
        name="settings", title="Layout and settings",
        tables=(facts("layout", [*_facts(plan)], header=("layout", "")),),
    )  # fmt: skip
    if plan.alternatives:
        yield Section(name="alternatives", title="The next layouts", tables=(_others(plan),))
    if plan.front:
        yield Section(
            name="front", title="The fastest layout for each memory", tables=(_front(plan),),
            figures=tuple(_front_figures(plan)),
        )  # fmt: skip


def _answer(plan: TrainingDocument) -> Section:
    predicted, memory, limit = plan.predicted, plan.memory, plan.inputs.memory_limit_bytes
    low, high = plan.range_seconds
    tokens, speed = predicted.tokens_per_second_per_device, speed_words(plan.throughput, "")
    span = seconds_span(plan.step_seconds, low, high)
    return Section(
        name="answer",
        title=plan.name,
        scope=plan_scope(plan),
        doubts=tuple(suspect_words(plan.inputs.profile, plan.profile_quality)),
        paragraphs=(
            *origin_words(plan),
            decision_words(plan.words, plan.layout),
            *model_placement_words(plan),
            binding_words(plan.best),
            *saving_words(plan),
            how_sure_of_training(plan),
        ),
        summary=(
            f"One step: {span}, {tokens:,.0f} tokens a second of each device, {speed}; "
            f"{format_bytes(memory.peak_bytes)} of {format_bytes(limit)} of its memory."
        ),
        notes=tuple(map(sentence, plan.warnings)),
        highlights=(
            Highlight(
                name="One step", cell=Cell.seconds(plan.step_seconds),
                note=f"{format_seconds(low)} to {format_seconds(high)}",
            ),
            Highlight(
                name="Tokens a second", cell=Cell(text=f"{tokens:,.0f}", value=tokens),
                note=f"of each device, {speed}",
            ),
            Highlight(
                name="Memory of a device", cell=Cell.size(memory.peak_bytes),
                note=f"of {format_bytes(limit)}, {percent(memory.peak_bytes / limit, digits=0)}",
            ),
        ),
    )  # fmt: skip


def _facts(plan: TrainingDocument) -> Iterator[tuple[str, str]]:
    best, layout = plan.best, plan.layout
    yield "recompute", _recomputed(best)
    yield "dispatcher", layout.dispatcher
    yield "overlap of exchanges", _overlap(best)
    yield "in host memory", _offloaded(best)
    if plan.chunks is not None:
        yield "states", _chunks(plan.chunks)
    yield "CUDA graphs", _graphs(best)
    yield "optimizer", f"{plan.inputs.optimizer}, ZeRO-{layout.zero}"
    if layout.pp > 1:
        yield "schedule", str(layout.schedule)
        yield "stages", stage_words(layout.stages or ())
    yield "runtime", plan.inputs.runtime
    yield "numbers", plan.trust


def _chunks(chunks: Chunks) -> str:
    where = "in host memory" if chunks.offload else "in shards, one on each replica"
    places = plural(chunks.cache_bytes // chunks.chunk_bytes, "chunk")
    return (
        f"chunks of {format_bytes(chunks.chunk_bytes)} {where}, {places} at a time in the cache: "
        "moetune.shard"
    )


def _recomputed(best: TrainingAnswer) -> str:
    """Return the modules that the layout recomputes, or what a runtime does without being told."""
    if not best.layout.recompute and best.predicted.parts.get("recompute"):
        return "none; activations of experts are not kept, and computed again"
    return best.layout.recompute_words


def _graphs(best: TrainingAnswer) -> str:
    return f"{best.layout.cuda_graphs}{_saves(best, best.predicted.saved_by_graphs_seconds)}"


def _overlap(best: TrainingAnswer) -> str:
    overlap, degree = str(best.layout.overlap), best.layout.degree
    if degree is not None:
        overlap += f" ({degree.forward} forward, {degree.backward} backward)"
    return f"{overlap}{_saves(best, best.predicted.saved_by_overlap_seconds)}"


def _saves(best: TrainingAnswer, seconds: float) -> str:
    if seconds <= 0:
        return ""
    share = percent(seconds / (best.predicted.step_seconds + seconds))
    return f": saves {Cell.seconds(seconds).text}, {share} of the step"


def _offloaded(best: TrainingAnswer) -> str:
    what = host_words(best.layout)
    return f"{what}, {format_bytes(best.memory.host_bytes)} a device" if what else "nothing"


def _time_table(best: TrainingAnswer) -> Table:
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
                Cell.words(one.layout.recompute_words), Cell.words(one.layout.overlap),
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
                Cell.words(one.layout.recompute_words),
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


def _memory_figure(plan: TrainingDocument) -> Figure:
    memory = plan.best.memory
    return memory_parts_figure(
        memory.parts, limit_bytes=plan.inputs.memory_limit_bytes,
        words=f"Predicted peak of a device of pipeline rank {memory.rank}, which needs most:",
    )  # fmt: skip


def _front_figures(plan: TrainingDocument) -> Iterator[Figure]:
    """Yield time against memory of the front; nothing where there is a single layout."""
    options = _front_options(plan)
    if len(options) <= 1:
        return
    figure = pareto_figure(options, limit_bytes=plan.inputs.memory_limit_bytes)
    num_far = sum(answer.layout != plan.layout for answer in plan.front) + 1 - len(options)
    far = (
        f" {plural(num_far, 'layout')} of more than {_SLOW:g} × the plan's time or {_LARGE:g} × "
        f"the limit {'is' if num_far == 1 else 'are'} only in the table."
    )
    yield replace(figure, words=f"{figure.words}{far if num_far else ''}", is_wide=True)


def _front_options(plan: TrainingDocument) -> list[Option]:
    """Return the plan, and the layouts of its front that are not far from it."""
    best, limit = plan.best, plan.inputs.memory_limit_bytes
    others = [one for one in plan.front if one.layout != best.layout]
    return [
        Option(
            name=one.words,
            group="with a pipeline" if one.layout.pp > 1 else "without a pipeline",
            step_seconds=one.predicted.step_seconds,
            memory_bytes=one.memory.peak_bytes,
            is_chosen=at == 0,
        )
        for at, one in enumerate((best, *others))
        if one.predicted.step_seconds <= _SLOW * best.predicted.step_seconds
        and one.memory.peak_bytes <= _LARGE * limit
    ]


def model_reasons(subject: ModelSubject) -> Reasons:
    """Return what an explanation shows of a training plan."""
    plan, best, inputs = subject.plan, subject.plan.best, subject.plan.inputs
    layouts = (best, *plan.alternatives)
    is_piped = any(row.layout.pp > 1 for row in layouts)
    is_tied = any(row.predicted.step_seconds < best.predicted.step_seconds for row in layouts)
    return Reasons(
        title=f"{inputs.model}: {best.words}",
        scope=(
            f"{inputs.world_size:,} ranks · {inputs.global_batch:,} sequences of {inputs.seq:,} "
            f"tokens · {inputs.dtype}"
        ),
        words=tuple(model_placement_words(plan)),
        why=(binding_words(best), *_saved(best), *_beside(best), *saving_words(plan)),
        sure=how_sure_of_training(plan),
        pins=tuple(pin_flags(inputs.pins).items()),
        terms=(_time(subject), _memory(subject), *_placement(plan)),
        notes=(*((_MEAN,) if is_piped else ()), *((_TIES,) if is_tied else ())),
    )


def _time(subject: ModelSubject) -> Section:
    best = subject.plan.best
    step = best.predicted.step_seconds
    kinds = (f"{name} {percent(seconds / step)}" for name, seconds in subject.kinds.items())
    return Section(
        name="terms", title="What the time consists of",
        paragraphs=(f"Of the step: {', '.join(kinds)}.",), tables=(_time_table(best),),
    )  # fmt: skip


def _memory(subject: ModelSubject) -> Section:
    memory, limit = subject.plan.memory, subject.memory_limit_bytes
    return Section(
        name="memory",
        title=f"Memory of a device: {Cell.size(memory.peak_bytes).text} of {Cell.size(limit).text}",
        tables=(next(_memory_parts(subject.plan.best)),),
    )


def _placement(plan: TrainingDocument) -> Iterator[Section]:
    """Yield how full the fullest rank of each layer is."""
    if plan.placement is None:
        return
    yield Section(
        name="placement",
        title="Rows of the fullest rank over the mean",
        tables=(
            Table(
                name="placement",
                header=("layer of experts", "own order", "placed", "at least"),
                rows=tuple(
                    _placed_row(number, one)
                    for number, one in enumerate(plan.placement.layers, start=1)
                ),
            ),
        ),
    )


def _placed_row(number: int, layer: LayerPlacement) -> tuple[Cell, ...]:
    skews = layer.natural_skew, layer.placed_skew, layer.least_skew
    return (
        Cell(text=str(number), value=number),
        *(Cell(text=f"{skew:.3f}", value=skew) for skew in skews),
    )


def _saved(best: TrainingAnswer) -> Iterator[str]:
    """Yield what the overlap of exchanges saves."""
    saved, step = best.predicted.saved_by_overlap_seconds, best.predicted.step_seconds
    if saved <= 0:
        return
    words = "Exchanges run beside another micro-batch's computation"
    degree = best.layout.degree
    if degree is not None:
        words = (
            f"Exchanges run in chunks ({degree.forward} forward, {degree.backward} "
            "backward) beside the experts of other chunks"
        )
    without = Cell.seconds(step + saved).text
    share = percent(saved / (step + saved))
    yield f"{words}: that saves {Cell.seconds(saved).text}, {share} of the {without} without it."


def _beside(best: TrainingAnswer) -> Iterator[str]:
    """Yield what shared experts hide."""
    hidden = best.predicted.hidden_by_shared_experts_seconds
    if hidden > 0:
        yield (
            "Shared experts run beside a layer's first dispatch, backward beside its last combine: "
            f"that hides {Cell.seconds(hidden).text} of exchanges."
        )


def training_figures(plans: Mapping[str, TrainingDocument]) -> Iterator[Figure]:
    """Yield the plans' steps by kind of time; nothing where an older plan has one rank's parts."""
    if len(plans) == 1:
        parts = {name: plan.predicted.parts for name, plan in plans.items()}
        words = "Predicted seconds on the slowest pipeline rank."
    else:
        parts = {name: plan.best.mean_parts for name, plan in plans.items()}
        words = "Predicted seconds on the mean of the pipeline ranks."
    if all(parts.values()):
        kinds = {name: kinds_of(seconds) for name, seconds in parts.items()}
        yield stacked_figure(kinds, title="One step", words=words)
