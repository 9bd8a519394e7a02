"""Drafts as a page shows them: the answer, layouts and why they lost, memory, timelines, front."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.units import format_bytes, format_seconds
from moetune.report.charts import (
    FrontChart,
    LaneChart,
    Piece,
    bytes_chart,
    seconds_chart,
)
from moetune.report.section import Cell, Highlight, Section, Table, sentence
from moetune.solve.layer.memory import device_bytes
from moetune.solve.layer.timeline import Timeline, shown_name
from moetune.solve.training.block_timeline import HIDDEN
from moetune.solve.training.pipeline import PassSpan
from moetune.solve.training.schedule import PASS_WORDS
from moetune.workflows.drafts import LayerDraft, ModelDraft
from moetune.workflows.training_plan import layout_words
from moetune.workflows.views.decision import how_sure_of_layout
from moetune.workflows.views.draft_front import options_chart
from moetune.workflows.views.draft_tables import choices, layouts, memory_table, step_table
from moetune.workflows.views.plan import page_sections
from moetune.workflows.views.training import decision_words
from moetune.workflows.views.words import (
    mfu_words,
    speed_cell,
    suspect_words,
)

_TONES = ("1", "2", "4", "5", "6", "7", "8", "3", "9")
_OF_CLASS = {"comp": "1", "comm": "2", "mem": "3"}
_PASS_TONES = {"F": "1", "B": "2", "I": "2", "W": "4"}
_OF_MODELS = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "workspace", "logits",
    "optimizer step", "fragmentation", "libraries",
)  # fmt: skip
_MODEL_TONES = (*_TONES[:3], "10", *_TONES[3:])
_OF_LAYERS = ("states", "activations", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """A draft as a page shows it.

    Args:
        sections: the answer first.
        memory: of a device, part by part.
        memory_table, step_table: the same, and the parts of the step, as numbers.
        timelines: of the layer, of the pipeline's stages and of the step; of those that there are.
        no_stages: why there is no timeline of stages; "" where there is one.
        front: of a layer; a model's takes as long as its plan, and comes after it (`front_view`).
    """

    sections: tuple[Section, ...]
    layouts: Table
    memory: LaneChart
    memory_table: Table
    step_table: Table
    timelines: tuple[LaneChart, ...]
    no_stages: str
    front: FrontChart | None


def layer_view(draft: LayerDraft) -> DraftView:
    """Return what is shown of a layer's draft."""
    explanation, plan = draft.explanation, draft.explanation.plan
    memory, times = plan.memory, plan.predicted
    passes = [
        ("forward", times.forward_seconds, "1"), ("backward", times.backward_seconds, "2"),
        ("gate and sorting", times.overhead_seconds, "3"),
    ]  # fmt: skip
    kept = {
        "each rank": {
            "states": memory.state_bytes,
            "activations": memory.activation_bytes,
            "buffers": memory.buffer_bytes,
        }
    }
    return DraftView(
        sections=page_sections(explanation),
        layouts=choices(draft),
        memory_table=memory_table(kept),
        step_table=step_table(passes),
        memory=bytes_chart(
            "memory", "Memory of one device",
            "What the layer keeps on each device, by the papers' formulas; a step peaks at "
            f"{format_bytes(device_bytes(memory))}. A layer has no pipeline: all ranks have as "
            "much.",
            kept,
            tones=dict(zip(_OF_LAYERS, _TONES, strict=False)),
            limit_bytes=explanation.memory_limit_bytes,
        ),
        timelines=(
            _streams(
                draft.forward, draft.backward, "One layer",
                "Chunks of a step on their streams: dispatch, experts and combine.",
            ),
            _step_chart(passes, "One step of the layer: its passes, and what is around them."),
        ),
        no_stages="A layer alone has no pipeline: its stages are those of a whole model.",
        front=options_chart(draft.options, "Every strategy with 1 to 64 chunks."),
    )  # fmt: skip


def model_view(draft: ModelDraft) -> DraftView:
    """Return what is shown of a decoder's draft."""
    plan = draft.plan
    best, limit = plan.best, plan.limit_bytes
    parts = sorted(best.step.parts.items(), key=lambda item: -item[1])
    pieces = [
        (name, seconds, _TONES[min(at, len(_TONES) - 1)])
        for at, (name, seconds) in enumerate((name, one) for name, one in parts if one > 0)
    ]
    block = _streams(
        draft.step.forward, draft.step.backward, "One block",
        f"Modules of {draft.step.block}, for one micro-batch on one rank. Each is drawn once; "
        "exchanges that another computation hides are below it.",
    )  # fmt: skip
    kept = {f"rank {at}": one.parts for at, one in enumerate(draft.ranks)}
    stages = (_stages(draft),) if best.layout.pp > 1 else ()
    step = _step_chart(
        pieces, f"{format_seconds(best.step.seconds)} on the slowest pipeline rank, by what takes "
        "it, the longest first.",
    )  # fmt: skip
    return DraftView(
        sections=(_answer(draft),),
        layouts=layouts(plan),
        memory_table=memory_table(kept),
        step_table=step_table(pieces),
        memory=bytes_chart(
            "memory",
            "Memory of each pipeline rank",
            "What a device of each pipeline rank takes at its peak, part by part.",
            kept,
            tones=dict(zip(_OF_MODELS, _MODEL_TONES, strict=True)),
            limit_bytes=limit,
        ),
        timelines=(block, *stages, step),
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
        f"{plan.request.target.name} · profile {plan.profile}",
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


def _streams(forward: Timeline, backward: Timeline, title: str, words: str) -> LaneChart:
    """Return both passes, each stream a lane, on one scale."""
    lanes: dict[str, list[Piece]] = {}
    for phase, timeline in (("forward", forward), ("backward", backward)):
        for span in timeline.spans:
            seconds = span.end_seconds - span.start_seconds
            lanes.setdefault(f"{phase}, {span.stream}", []).append(
                Piece(
                    start=span.start_seconds, length=seconds,
                    tone="9" if span.stream == HIDDEN else _OF_CLASS[span.resource],
                    label=shown_name(span.name),
                    words=f"{phase} {shown_name(span.name)}: {format_seconds(seconds)}",
                )
            )  # fmt: skip
    passes = (
        f"Forward {format_seconds(forward.makespan_seconds)}, backward "
        f"{format_seconds(backward.makespan_seconds)}."
    )
    return seconds_chart("layer", title, f"{words} {passes}", lanes, totals={})


def _stages(draft: ModelDraft) -> LaneChart:
    lanes: dict[str, list[Piece]] = {}
    step = draft.step
    for one in sorted(step.passes, key=lambda span: (span.rank, span.start_seconds)):
        lanes.setdefault(f"rank {one.rank}", []).append(_pass(one))
    shown, num = step.num_shown, step.num_micro_batches
    which = f"the first {shown} of {num}" if shown < num else f"all {num}"
    kinds = {one.kind for one in step.passes}
    legend = [(_PASS_TONES[one], words) for one, words in PASS_WORDS.items() if one in kinds]
    return seconds_chart(
        "stages", "Pipeline",
        f"Passes of {which} micro-batches on each pipeline rank, as the schedule "
        f"{draft.plan.best.layout.order} has them; numbers are micro-batches, gaps are waiting.",
        lanes, legend=legend, totals={},
    )  # fmt: skip


def _pass(one: PassSpan) -> Piece:
    tone, name = _PASS_TONES[one.kind], PASS_WORDS[one.kind]
    seconds = one.end_seconds - one.start_seconds
    return Piece(
        start=one.start_seconds, length=seconds, tone=tone, label=str(one.batch + 1),
        words=f"{name} of micro-batch {one.batch + 1}, stage {one.stage + 1}: "
        f"{format_seconds(seconds)}",
    )  # fmt: skip


def _step_chart(parts: Sequence[tuple[str, float, str]], words: str) -> LaneChart:
    at, pieces, few = 0.0, [], len(_TONES) - 1
    if len(parts) > len(_TONES):  # each colour once
        rest = sum(seconds for _, seconds, _ in parts[few:])
        parts = [*parts[:few], ("all others", rest, _TONES[few])]
    for name, seconds, tone in parts:
        pieces.append(
            Piece(
                start=at, length=seconds, tone=tone, label=name,
                words=f"{name}: {format_seconds(seconds)}",
            )
        )  # fmt: skip
        at += seconds
    return seconds_chart(
        "step", "One step", words, {"step": pieces},
        legend=[(tone, name) for name, seconds, tone in parts if seconds],
    )  # fmt: skip
