"""Drafts as a page shows them: the answer, layouts and why they lost, memory, timelines, front."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.cluster import HEADROOM
from moetune.domain.plan import Plan
from moetune.domain.training import FoldedLayout
from moetune.domain.units import format_seconds
from moetune.report.charts import (
    FrontChart,
    LaneChart,
    Piece,
    bytes_chart,
    front_chart,
    seconds_chart,
)
from moetune.report.plan_figures import Option
from moetune.report.section import EMPTY, Cell, Highlight, Section, Table, percent, sentence
from moetune.solve.layer.timeline import Timeline
from moetune.solve.layer.words import STRATEGY_WORDS
from moetune.solve.training.block_timeline import HIDDEN
from moetune.solve.training.pipeline import PassSpan
from moetune.solve.training.search import NOISE, PricedLayout
from moetune.workflows.drafts import LayerDraft, ModelDraft
from moetune.workflows.training import TrainingPlan, layout_words
from moetune.workflows.views.plan import page_sections
from moetune.workflows.views.words import how_sure_of_layout

_TONES = ("1", "2", "4", "5", "6", "7", "8", "3", "9")
_OF_CLASS = {"comp": "1", "comm": "2", "mem": "3"}
_PASSES = {
    "F": ("1", "forward"), "B": ("2", "backward"), "I": ("2", "gradients of inputs"),
    "W": ("4", "gradients of weights"),
}  # fmt: skip
_OF_MODELS = (
    "parameters", "gradients", "optimizer", "activations", "workspace", "logits", "optimizer step",
    "fragmentation", "libraries",
)  # fmt: skip
_OF_LAYERS = ("states", "activations", "buffers")
_WHY = "why not this one"
_NAMED = 2
"""Parts of a difference that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """What a page shows of a draft.

    Args:
        sections: the answer first.
        memory: of a device, part by part.
        timelines: of the layer, of the pipeline's stages and of the step; of those that there are.
        no_stages: why there is no timeline of stages; "" where there is one.
        front: None with fewer than two options.
    """

    sections: tuple[Section, ...]
    layouts: Table
    memory: LaneChart
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
    return DraftView(
        sections=page_sections(explanation),
        layouts=_choices(draft),
        memory=bytes_chart(
            "memory", "Memory of one device",
            "What the layer keeps on each device. A layer has no pipeline: all ranks have as much.",
            {"each rank": {
                "states": memory.state_bytes, "activations": memory.activation_bytes,
                "buffers": memory.buffer_bytes,
            }},
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
        front=_front(draft.options, "Every strategy with 1 to 64 chunks."),
    )  # fmt: skip


def model_view(draft: ModelDraft) -> DraftView:
    """Return what is shown of a decoder's draft."""
    plan = draft.plan
    best, limit = plan.best, plan.limit_bytes
    parts = sorted(best.step.parts.items(), key=lambda item: -item[1])
    pieces = [
        (name, seconds, _TONES[at % len(_TONES)])
        for at, (name, seconds) in enumerate((name, one) for name, one in parts if one > 0)
    ]
    block = _streams(
        draft.forward, draft.backward, "One block",
        f"Modules of {draft.block}, for one micro-batch on one rank. Each is drawn once; exchanges "
        "that another computation hides are below it.",
    )  # fmt: skip
    stages = (_stages(draft),) if draft.passes else ()
    step = _step_chart(
        pieces, f"{format_seconds(best.step.seconds)} on the slowest pipeline rank, by what takes "
        "it, the longest first.",
    )  # fmt: skip
    return DraftView(
        sections=(_answer(draft),),
        layouts=_layouts(plan),
        memory=bytes_chart(
            "memory", "Memory of each pipeline rank",
            "What a device of each pipeline rank takes at its peak, part by part.",
            {f"rank {at}": one.parts for at, one in enumerate(draft.ranks)},
            tones=dict(zip(_OF_MODELS, _TONES, strict=True)), limit_bytes=limit,
        ),
        timelines=(block, *stages, step),
        no_stages="" if stages else "This layout has no pipeline: every rank has all blocks.",
        front=_front(
            [_option(one, is_chosen=one is best) for one in plan.found],
            "The layouts that the search kept: the fastest of different sizes, not all there are.",
        ),
    )  # fmt: skip


def why_not(plan: TrainingPlan, other: PricedLayout) -> str:
    """Return in a sentence why a layout lost: what takes longer, or what decided a tie."""
    best = plan.best
    step = best.step.seconds
    slower = other.step.seconds / step - 1
    if slower <= NOISE:
        return f"As fast within {NOISE:.0%}; {_tie(plan, other)}."
    names = dict.fromkeys((*best.step.parts, *other.step.parts))
    more = {
        name: other.step.parts.get(name, 0.0) - best.step.parts.get(name, 0.0) for name in names
    }
    longest = sorted((-seconds, name) for name, seconds in more.items() if seconds > 0)[:_NAMED]
    said = " and ".join(
        f"{name} takes {percent(-seconds / step)} of the step more" for seconds, name in longest
    )
    return sentence(f"{percent(slower)} slower: {said}")


def _tie(plan: TrainingPlan, other: PricedLayout) -> str:
    on_host = other.layout.offload_activations + other.layout.offload_optimizer
    if on_host > plan.best.layout.offload_activations + plan.best.layout.offload_optimizer:
        return "the chosen one keeps less in host memory"
    roomy = plan.limit_bytes * (1 - HEADROOM)
    if other.memory.peak_bytes > roomy >= plan.best.memory.peak_bytes:
        return "the chosen one leaves memory free"
    return "the chosen one is simpler"


def _answer(draft: ModelDraft) -> Section:
    plan = draft.plan
    job, best, sure = plan.request.job, plan.best, plan.confidence
    per_device = job.tokens / best.step.seconds / job.world_size
    flops = per_device * job.decoder.flops_per_token(job.length).total
    low, high = map(format_seconds, (sure.p05_step_seconds, sure.p95_step_seconds))
    binds = max(best.step.parts, key=best.step.parts.__getitem__)
    return Section(
        name="answer",
        title=f"{draft.title} on {job.world_size:,} ranks",
        scope=f"{job.global_batch:,} sequences of {job.length:,} tokens a step · {job.dtype} · "
        f"{plan.request.target.name} · profile {plan.profile}",
        paragraphs=(_decision(best.layout), how_sure_of_layout(sure)),
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
                name="Model TFLOP/s", note="of each device",
                cell=Cell(text=f"{flops / 1e12:,.0f}", value=flops / 1e12),
            ),
            Highlight(
                name="Memory of one device", cell=Cell.size(round(best.memory.peak_bytes)),
                note=f"of {Cell.size(plan.limit_bytes).text}",
            ),
            Highlight(name="Takes most", cell=Cell.words(binds), note=f"{plan.trust} numbers"),
        ),
        notes=tuple(map(sentence, plan.stand_ins.words)),
    )  # fmt: skip


def _decision(layout: FoldedLayout) -> str:
    again = ", ".join(layout.recompute) or "nothing"
    return (
        f"Lay it out as {layout_words(layout)}; recompute {again}, exchange with "
        f"{layout.dispatcher}, overlap {layout.overlap}, schedule {layout.order}."
    )


def _layouts(plan: TrainingPlan) -> Table:
    best, job = plan.best, plan.request.job
    return Table(
        name="layouts",
        title="Layouts",
        header=(
            "layout", "recompute, overlap, schedule", "step", "slower by", "tokens/s a device",
            "memory", _WHY,
        ),
        rows=tuple(
            (
                Cell.words(layout_words(one.layout), mark="chosen" if one is best else ""),
                Cell.words(_how(one.layout)),
                Cell.seconds(one.step.seconds),
                EMPTY if one is best else Cell.share(one.step.seconds / best.step.seconds - 1,
                                                     sign=True),
                _speed(job.tokens / job.world_size, one.step.seconds),
                Cell.size(round(one.memory.peak_bytes)),
                Cell.words("The plan." if one is best else why_not(plan, one)),
            )
            for one in plan.found
        ),
    )  # fmt: skip


def _how(layout: FoldedLayout) -> str:
    again = " + ".join(layout.recompute) or "no recomputation"
    overlap = "no overlap" if layout.overlap == "none" else f"overlap {layout.overlap}"
    return f"{again}, {overlap}, {layout.order}"


def _choices(draft: LayerDraft) -> Table:
    plan = draft.explanation.plan
    memory = plan.memory
    chosen = (
        Cell.words(_degrees(plan.pipeline.forward_degree, plan.pipeline.backward_degree),
                   mark="chosen"),
        Cell.words(memory.strategy), Cell.words(plan.pipeline.dispatcher),
        Cell.seconds(plan.predicted.step_seconds), EMPTY,
        _speed(plan.inputs.tokens_per_rank, plan.predicted.step_seconds),
        Cell.size(memory.state_bytes + memory.activation_bytes + memory.buffer_bytes),
        Cell.words("The plan."),
    )  # fmt: skip
    return Table(
        name="layouts",
        title="Chunks and strategies",
        header=(
            "chunks", "strategy", "dispatcher", "step", "slower by", "tokens/s a rank", "memory",
            _WHY,
        ),
        rows=(chosen, *_lost(plan, draft.alternative_bytes)),
        notes=("; ".join(f"{name}: {words}" for name, words in STRATEGY_WORDS.items()) + ".",),
    )  # fmt: skip


def _lost(plan: Plan, sizes: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    best = plan.predicted.step_seconds
    for one, num_bytes in zip(plan.alternatives, sizes, strict=True):
        yield (
            Cell.words(_degrees(one.forward_degree, one.backward_degree)),
            Cell.words(one.strategy), Cell.words(one.dispatcher),
            Cell.seconds(one.step_seconds),
            Cell.share(one.step_seconds / best - 1 if best else None, sign=True),
            _speed(plan.inputs.tokens_per_rank, one.step_seconds),
            Cell.size(num_bytes),
            Cell.words(sentence(one.lost_because)),
        )  # fmt: skip


def _degrees(forward: int, backward: int) -> str:
    return f"{forward} and {backward}"


def _speed(tokens: float, seconds: float) -> Cell:
    speed = tokens / seconds if seconds else None
    return Cell(text="" if speed is None else f"{speed:,.0f}", value=speed)


def _option(one: PricedLayout, *, is_chosen: bool) -> Option:
    return Option(
        name=layout_words(one.layout),
        group="with a pipeline" if one.layout.pp > 1 else "without a pipeline",
        step_seconds=one.step.seconds, memory_bytes=round(one.memory.peak_bytes),
        is_chosen=is_chosen,
    )  # fmt: skip


def _front(options: Sequence[Option], what: str) -> FrontChart | None:
    if len(options) < 2:  # noqa: PLR2004 - one point is no front
        return None
    return front_chart(
        f"{what} Down and to the left is better: no option is both faster and smaller than one on "
        "the line. The large point is the plan.",
        options,
    )


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
                    label=span.name, words=f"{phase} {span.name}: {format_seconds(seconds)}",
                )
            )  # fmt: skip
    passes = (
        f"Forward {format_seconds(forward.makespan_seconds)}, backward "
        f"{format_seconds(backward.makespan_seconds)}."
    )
    return seconds_chart("layer", title, f"{words} {passes}", lanes, totals={})


def _stages(draft: ModelDraft) -> LaneChart:
    lanes: dict[str, list[Piece]] = {}
    for one in sorted(draft.passes, key=lambda span: (span.rank, span.start_seconds)):
        lanes.setdefault(f"rank {one.rank}", []).append(_pass(one))
    shown, num = draft.num_shown, draft.num_micro_batches
    which = f"the first {shown} of {num}" if shown < num else f"all {num}"
    kinds = dict.fromkeys(one.kind for one in draft.passes)
    return seconds_chart(
        "stages", "Pipeline",
        f"Passes of {which} micro-batches on each pipeline rank, as the schedule "
        f"{draft.plan.best.layout.order} has them; numbers are micro-batches, gaps are waiting.",
        lanes, legend=[_PASSES[kind] for kind in _PASSES if kind in kinds], totals={},
    )  # fmt: skip


def _pass(one: PassSpan) -> Piece:
    tone, name = _PASSES[one.kind]
    seconds = one.end_seconds - one.start_seconds
    return Piece(
        start=one.start_seconds, length=seconds, tone=tone, label=str(one.batch + 1),
        words=f"{name} of micro-batch {one.batch + 1}, stage {one.stage}: "
        f"{format_seconds(seconds)}",
    )  # fmt: skip


def _step_chart(parts: Sequence[tuple[str, float, str]], words: str) -> LaneChart:
    at, pieces = 0.0, []
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
