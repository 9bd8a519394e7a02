"""Drafts as a page shows them: the answer, layouts and why they lost, memory, timelines, front."""

from dataclasses import dataclass

from moetune.domain.units import format_seconds
from moetune.report.memory_figure import memory_parts_figure
from moetune.report.plan_figures import pareto_figure, phases_figure, stacked_figure
from moetune.report.section import Cell, Figure, Highlight, Section, Table, sentence
from moetune.report.timelines import passes_figure, timeline_figure
from moetune.workflows.drafts import LayerDraft, ModelDraft
from moetune.workflows.training_plan import layout_words
from moetune.workflows.views.decision import how_sure_of_layout
from moetune.workflows.views.draft_tables import choices, layouts, memory_table, step_table
from moetune.workflows.views.plan import page_sections
from moetune.workflows.views.training import decision_words
from moetune.workflows.views.training_explanation import kinds_of
from moetune.workflows.views.words import (
    mfu_words,
    speed_cell,
    suspect_words,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """A draft as a page shows it.

    Args:
        sections: the answer first.
        memory: of the device that needs most, part by part.
        memory_table, step_table: of each rank, and the parts of the step, as numbers.
        timelines: of the layer, of the pipeline's stages and of the step; of those that there are.
        no_stages: why there is no timeline of stages; "" where there is one.
        front: of a layer; a model's takes as long as its plan, and comes after it (`front_view`).
    """

    sections: tuple[Section, ...]
    layouts: Table
    memory: Figure
    memory_table: Table
    step_table: Table
    timelines: tuple[Figure, ...]
    no_stages: str
    front: Figure | None


def layer_view(draft: LayerDraft) -> DraftView:
    """Return what is shown of a layer's draft."""
    explanation, plan = draft.explanation, draft.explanation.plan
    memory, times = plan.memory, plan.predicted
    passes = [
        ("forward", times.forward_seconds), ("backward", times.backward_seconds),
        ("gate and sorting", times.overhead_seconds),
    ]  # fmt: skip
    kept = {
        "states": memory.state_bytes,
        "activations": memory.activation_bytes,
        "buffers": memory.buffer_bytes,
    }
    limit = explanation.memory_limit_bytes
    has_front = len(draft.options) > 1
    return DraftView(
        sections=page_sections(explanation),
        layouts=choices(draft),
        memory_table=memory_table({"each rank": kept}),
        step_table=step_table(passes),
        memory=memory_parts_figure(
            kept,
            limit_bytes=limit,
            words="What the layer keeps on each device, by the papers' formulas. A layer has no "
            "pipeline: all ranks have as much.",
        ),
        timelines=(
            timeline_figure(forward=draft.forward, backward=draft.backward, title="One layer"),
            phases_figure({"this plan": plan}),
        ),
        no_stages="A layer alone has no pipeline: its stages are those of a whole model.",
        front=pareto_figure(draft.options, limit_bytes=limit) if has_front else None,
    )


def model_view(draft: ModelDraft) -> DraftView:
    """Return what is shown of a decoder's draft."""
    plan = draft.plan
    best, limit = plan.best, plan.limit_bytes
    parts = sorted(best.step.parts.items(), key=lambda item: -item[1])
    kept = {f"rank {at}": one.parts for at, one in enumerate(draft.ranks)}
    fullest = max(kept, key=lambda rank: sum(kept[rank].values()))
    stages = (_stages(draft),) if best.layout.pp > 1 else ()
    step = stacked_figure(
        {"this plan": kinds_of(best.step.parts)},
        title="One step",
        words=f"{format_seconds(best.step.seconds)} on the slowest pipeline rank, by kind.",
    )
    return DraftView(
        sections=(_answer(draft),),
        layouts=layouts(plan),
        memory_table=memory_table(kept),
        step_table=step_table([(name, seconds) for name, seconds in parts if seconds > 0]),
        memory=memory_parts_figure(
            kept[fullest],
            limit_bytes=limit,
            words=f"What a device of pipeline {fullest} takes at its peak.",
        ),
        timelines=(_block(draft), *stages, step),
        no_stages="" if stages else "This layout has no pipeline: every rank has all blocks.",
        front=None,
    )


def _answer(draft: ModelDraft) -> Section:
    plan = draft.plan
    job, best, sure = plan.request.job, plan.best, plan.confidence
    per_device, speed = plan.tokens_per_second(best), plan.throughput(best)
    low, high = map(format_seconds, (sure.p05_step_seconds, sure.p95_step_seconds))
    binds = max(best.step.parts, key=best.step.parts.__getitem__)
    return Section(
        name="answer",
        title=f"{draft.title} on {job.world_size:,} ranks",
        scope=f"{job.global_batch:,} sequences of {job.length:,} tokens a step · {job.dtype} · "
        f"{plan.request.target.spec} · profile {plan.profile}",
        doubts=tuple(suspect_words(plan.profile, plan.quality)),
        paragraphs=(
            decision_words(layout_words(best.layout), best.layout), how_sure_of_layout(sure),
        ),
        highlights=(
            Highlight(
                name="One step of the model", cell=Cell.seconds(best.step.seconds),
                note=f"{low} to {high}",
            ),
            Highlight(
                name="Tokens a second", note="on each device",
                cell=Cell(text=f"{per_device:,.0f}", value=per_device),
            ),
            Highlight(
                name="Model FLOP/s", note=f"on each device, {mfu_words(speed)}",
                cell=speed_cell(speed),
            ),
            Highlight(
                name="Memory of one device", cell=Cell.size(round(best.memory.peak_bytes)),
                note=f"of {Cell.size(plan.limit_bytes).text}",
            ),
            Highlight(name="Takes most", cell=Cell.words(binds), note=f"{plan.trust} numbers"),
        ),
        notes=tuple(map(sentence, plan.warnings)),
    )  # fmt: skip


def _block(draft: ModelDraft) -> Figure:
    return timeline_figure(
        forward=draft.step.forward,
        backward=draft.step.backward,
        title="One block",
        words=f"Modules of {draft.step.block}, for one micro-batch on one rank. Each is drawn "
        "once; exchanges that another computation hides are below it.",
    )


def _stages(draft: ModelDraft) -> Figure:
    step = draft.step
    shown, num = step.num_shown, step.num_micro_batches
    which = f"the first {shown} of {num}" if shown < num else f"all {num}"
    return passes_figure(
        step.passes,
        words=f"Passes of {which} micro-batches on each pipeline rank, as the schedule "
        f"{draft.plan.best.layout.order} has them; numbers are micro-batches, gaps are waiting.",
    )
