"""A training plan on a page, and two of them side by side."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.plan_figures import stacked_figure
from moetune.report.section import Cell, Figure, Highlight, Section, percent, plural
from moetune.workflows.views.training import training_sections
from moetune.workflows.views.training_explanation import explain_training

_STEP_WORDS = "Predicted seconds on the slowest pipeline rank."


def training_scope(plan: TrainingDocument) -> str:
    """Return "64 ranks · 1,024 sequences of 4,096 tokens · bfloat16 · for megatron"."""
    inputs = plan.inputs
    batch = f"{plural(inputs.global_batch, 'sequence')} of {inputs.seq:,} tokens"
    return f"{plural(inputs.world_size, 'rank')} · {batch} · {inputs.dtype} · for {inputs.target}"


def training_page(plan: TrainingDocument) -> tuple[Section, ...]:
    """Return a training plan's sections for a page, the numbers to read first on top."""
    answer, *rest = training_sections(plan)
    predicted, memory, sure = plan.best.predicted, plan.best.memory, plan.confidence
    low, high = map(format_seconds, (sure.p05_step_seconds, sure.p95_step_seconds))
    limit = plan.inputs.memory_limit_bytes
    share = percent(memory.peak_bytes / limit, digits=0)
    speed, rate = predicted.tokens_per_second_per_device, predicted.model_tflops_per_device
    return (
        replace(
            answer,
            title=f"Training {plan.inputs.model}: {plan.best.words}",
            scope=training_scope(plan),
            highlights=(
                Highlight(
                    name="One step", cell=Cell.seconds(predicted.step_seconds),
                    note=f"{low} to {high}",
                ),
                Highlight(
                    name="Tokens a second", cell=Cell(text=f"{speed:,.0f}", value=speed),
                    note=f"of each device, {rate:.0f} TFLOP/s",
                ),
                Highlight(
                    name="Memory of a device", cell=Cell.size(memory.peak_bytes),
                    note=f"of {format_bytes(limit)}, {share}",
                ),
            ),
            figures=tuple(training_figures({"this plan": plan})),
        ),
        *rest,
    )  # fmt: skip


def training_figures(plans: Mapping[str, TrainingDocument]) -> Iterator[Figure]:
    """Yield the plans' steps by kind of time."""
    kinds = {name: explain_training(one).kinds for name, one in plans.items()}
    yield stacked_figure(kinds, title="One step", words=_STEP_WORDS)


def compare_training(
    first: TrainingDocument, second: TrainingDocument, names: tuple[str, str]
) -> Iterator[str]:
    """Yield sentences on how the second plan differs: its inputs, its step, layout and memory."""
    left, right = first.inputs, second.inputs
    changed = [
        f"{name.replace('_', ' ')} {getattr(right, name)} instead of {getattr(left, name)}"
        for name in (
            "model", "world_size", "global_batch", "seq", "dtype", "profile", "target",
            "optimizer", "routing",
        )
        if getattr(left, name) != getattr(right, name)
    ]  # fmt: skip
    if changed:
        yield f"{names[1]} has {', '.join(changed)}."
    ratio = second.best.predicted.step_seconds / first.best.predicted.step_seconds
    is_same_work = all(
        getattr(left, name) == getattr(right, name) for name in ("model", "global_batch", "seq")
    )
    if is_same_work:
        yield f"Its step takes {percent(ratio - 1, sign=True)} as against {names[0]}."
    if first.best.words != second.best.words:
        yield f"It takes {second.best.words} instead of {first.best.words}."
    was, now = first.best.memory.peak_bytes, second.best.memory.peak_bytes
    yield f"A device's memory peaks at {format_bytes(now)} instead of {format_bytes(was)}."
