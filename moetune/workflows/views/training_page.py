"""A training plan on a page, and two of them side by side."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.plan_figures import Option, memory_parts_figure, pareto_figure, stacked_figure
from moetune.report.section import Cell, Figure, Highlight, Section, percent, plural, sentence
from moetune.workflows.subjects.model import kinds_of
from moetune.workflows.training_changes import input_differences, layout_changes, step_change
from moetune.workflows.views.decision import how_sure_of_training
from moetune.workflows.views.first_words import binding_words, saving_words
from moetune.workflows.views.training import decision_words, training_sections
from moetune.workflows.views.words import model_placement_words, speed_words

_SLOW, _LARGE = 3.0, 1.25
"""Multiples of a plan's step, and of its limit of memory, up to which pages show a front."""
_SLOWEST_WORDS = "Predicted seconds on the slowest pipeline rank."
_MEAN_WORDS = "Predicted seconds on the mean of the pipeline ranks."


def training_scope(plan: TrainingDocument) -> str:
    """Return "64 ranks · 1,024 sequences of 4,096 tokens · bfloat16 · for megatron@0.18.2"."""
    inputs = plan.inputs
    batch = f"{plural(inputs.global_batch, 'sequence')} of {inputs.seq:,} tokens"
    return f"{plural(inputs.world_size, 'rank')} · {batch} · {inputs.dtype} · for {inputs.runtime}"


def training_page(plan: TrainingDocument) -> tuple[Section, ...]:
    """Return a training plan's sections for a page: the numbers to read first, then its memory."""
    origin, answer, time, memory_section, *rest = training_sections(plan)
    predicted, memory, sure = plan.best.predicted, plan.best.memory, plan.confidence
    low, high = map(format_seconds, (sure.p05_step_seconds, sure.p95_step_seconds))
    limit = plan.inputs.memory_limit_bytes
    share = percent(memory.peak_bytes / limit, digits=0)
    speed = predicted.tokens_per_second_per_device
    return (
        replace(
            answer,
            doubts=origin.doubts,
            title=f"Training {plan.inputs.model}: {plan.best.words}",
            scope=training_scope(plan),
            paragraphs=(
                origin.title, *origin.paragraphs,
                decision_words(plan.best.words, plan.layout),
                *model_placement_words(plan),
                binding_words(plan.best), *saving_words(plan),
                how_sure_of_training(plan),
            ),
            notes=tuple(map(sentence, plan.warnings)),
            tables=(),
            highlights=(
                Highlight(
                    name="One step", cell=Cell.seconds(predicted.step_seconds),
                    note=f"{low} to {high}",
                ),
                Highlight(
                    name="Tokens a second", cell=Cell(text=f"{speed:,.0f}", value=speed),
                    note=f"of each device, {speed_words(predicted.throughput, '')}",
                ),
                Highlight(
                    name="Memory of a device", cell=Cell.size(memory.peak_bytes),
                    note=f"of {format_bytes(limit)}, {share}",
                ),
            ),
        ),
        replace(memory_section, figures=(_memory_figure(plan),)),
        replace(time, figures=tuple(training_figures({"this plan": plan}))),
        Section(name="settings", title="Layout and settings", tables=answer.tables),
        *(_drawn(one, plan) for one in rest),
    )  # fmt: skip


def _memory_figure(plan: TrainingDocument) -> Figure:
    memory = plan.best.memory
    return memory_parts_figure(
        memory.parts, limit_bytes=plan.inputs.memory_limit_bytes,
        words=f"Predicted peak of a device of pipeline rank {memory.rank}, which needs most:",
    )  # fmt: skip


def _drawn(section: Section, plan: TrainingDocument) -> Section:
    """Return the section of the front with its figure, and others as they are."""
    if section.name != "front":
        return section
    options = _front_options(plan)
    if len(options) <= 1:
        return section
    limit = plan.inputs.memory_limit_bytes
    figure = pareto_figure(options, limit_bytes=limit)
    num_far = sum(one.layout != plan.layout for one in plan.front) + 1 - len(options)
    far = (
        f" {plural(num_far, 'layout')} of more than {_SLOW:g} × the plan's time or {_LARGE:g} × "
        f"the limit {'is' if num_far == 1 else 'are'} only in the table."
    )
    words = f"{figure.words}{far if num_far else ''}"
    return replace(section, figures=(replace(figure, words=words, is_wide=True),))


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


def training_figures(plans: Mapping[str, TrainingDocument]) -> Iterator[Figure]:
    """Yield the plans' steps by kind of time; nothing where an older plan has one rank's parts."""
    if len(plans) == 1:
        kinds = {name: kinds_of(one.best.predicted.parts) for name, one in plans.items()}
        yield stacked_figure(kinds, title="One step", words=_SLOWEST_WORDS)
    elif all(one.best.mean_parts for one in plans.values()):
        kinds = {name: kinds_of(one.best.mean_parts) for name, one in plans.items()}
        yield stacked_figure(kinds, title="One step", words=_MEAN_WORDS)


def compare_training(
    first: TrainingDocument, second: TrainingDocument, names: tuple[str, str]
) -> Iterator[str]:
    """Yield sentences on how the second plan differs: its inputs, its step, layout and memory."""
    changed = ", ".join(input_differences(first, second))
    if changed:
        yield f"{names[1]} has {changed}."
    yield step_change(first, second)
    yield from layout_changes(first, second)
