"""Tables of drafts: what was chosen, what lost and why, and the numbers of figures."""

from collections.abc import Iterator, Mapping, Sequence

from moetune.domain.cluster import HEADROOM
from moetune.domain.plan import Plan
from moetune.domain.training import FoldedLayout
from moetune.domain.units import format_share
from moetune.report.section import EMPTY, Cell, Table, percent, sentence
from moetune.solve.joint.ties import NOISE, PricedLayout, on_host
from moetune.solve.layer.memory import device_bytes
from moetune.solve.layer.words import STRATEGY_WORDS
from moetune.workflows.drafts import LayerDraft
from moetune.workflows.training_plan import TrainingPlan, layout_words
from moetune.workflows.views.training import host_words

WHY = "why not this one"
SHARES = f"{WHY}: shares are of the plan's step."
_NAMED, _LEAST = 2, 0.001
"""Parts of a difference that a sentence names, if they are no smaller than this of the step."""


def layouts(plan: TrainingPlan) -> Table:
    """Return a model's layouts, the chosen one first."""
    best, job = plan.best, plan.request.job
    return Table(
        name="layouts",
        title="Layouts",
        header=(
            "layout", "recompute, overlap, schedule", "step", "slower by", "tokens/s a device",
            "memory", WHY,
        ),
        rows=tuple(
            (
                Cell.words(layout_words(one.layout), mark="chosen" if one is best else ""),
                Cell.words(how_words(one.layout)),
                Cell.seconds(one.step.seconds),
                EMPTY if one is best else Cell.share(one.step.seconds / best.step.seconds - 1,
                                                     sign=True),
                _speed(job.tokens / job.world_size, one.step.seconds),
                Cell.size(round(one.memory.peak_bytes)),
                Cell.words("The plan." if one is best else why_not(plan, one)),
            )
            for one in plan.found
        ),
        notes=(SHARES,),
    )  # fmt: skip


def how_words(layout: FoldedLayout) -> str:
    """Return "norm, no overlap, 1f1b", and what is in host memory."""
    again = " + ".join(layout.recompute) or "no recomputation"
    overlap = "no overlap" if layout.overlap == "none" else f"overlap {layout.overlap}"
    on_host = host_words(layout)
    where = f"; in host memory {on_host}" if on_host else ""
    return f"{again}, {overlap}, {layout.order}{where}"


def choices(draft: LayerDraft) -> Table:
    """Return a layer's chunks and strategies, the chosen ones first."""
    plan = draft.explanation.plan
    memory = plan.memory
    chosen = (
        Cell.words(_degrees(plan.pipeline.forward_degree, plan.pipeline.backward_degree),
                   mark="chosen"),
        Cell.words(memory.strategy),
        Cell.seconds(plan.predicted.step_seconds), EMPTY,
        _speed(plan.inputs.tokens_per_rank, plan.predicted.step_seconds),
        Cell.size(device_bytes(memory)),
        Cell.words("The plan."),
    )  # fmt: skip
    return Table(
        name="layouts",
        title="Chunks and strategies",
        header=(
            "chunks", "strategy", "step", "slower by", "tokens/s a rank", "memory",
            WHY,
        ),
        rows=(chosen, *_lost(plan, draft.alternative_bytes)),
        notes=("; ".join(f"{name}: {words}" for name, words in STRATEGY_WORDS.items()) + ".",),
    )  # fmt: skip


def _lost(plan: Plan, sizes: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    best = plan.predicted.step_seconds
    for one, num_bytes in zip(plan.alternatives, sizes, strict=True):
        yield (
            Cell.words(_degrees(one.forward_degree, one.backward_degree)),
            Cell.words(one.strategy),
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


_PART_WORDS = {
    "tensor_comm": "tensor-parallel collectives", "context_comm": "context-parallel exchanges",
    "core_attn": "attention without its projections", "moe_act": "the experts' activation",
}  # fmt: skip
"""Of a step, as sentences name them; tables have Megatron's names."""


def why_not(plan: TrainingPlan, other: PricedLayout) -> str:
    """Return in a sentence why a layout lost: what takes longer, or what decided a tie."""
    best = plan.best
    step = best.step.seconds
    slower = other.step.seconds / step - 1
    if slower <= NOISE:
        return f"As fast within {format_share(NOISE, digits=0)}; {_tie(plan, other)}."
    names = dict.fromkeys((*best.step.parts, *other.step.parts))
    more = {
        name: other.step.parts.get(name, 0.0) - best.step.parts.get(name, 0.0) for name in names
    }
    longest = sorted((-seconds, name) for name, seconds in more.items() if seconds > _LEAST * step)[
        :_NAMED
    ]
    said = " and ".join(
        f"{percent(-seconds / step)} more for {_PART_WORDS.get(name, name)}"
        for seconds, name in longest
    )
    return sentence(f"{percent(slower)} slower: {said}")


def _tie(plan: TrainingPlan, other: PricedLayout) -> str:
    if on_host(other.layout) > on_host(plan.best.layout):
        return "the chosen one keeps less in host memory"
    roomy = plan.limit_bytes * (1 - HEADROOM)
    if other.memory.peak_bytes > roomy >= plan.best.memory.peak_bytes:
        return "the chosen one leaves memory free"
    return "the chosen one is simpler"


def memory_table(kept: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the bytes of each rank's parts."""
    names = dict.fromkeys(name for parts in kept.values() for name, size in parts.items() if size)
    return Table(
        name="memory-parts",
        header=("", *names, "all"),
        rows=tuple(
            (
                Cell.words(rank),
                *(Cell.size(round(parts.get(name, 0.0))) for name in names),
                Cell.size(round(sum(parts.values()))),
            )
            for rank, parts in kept.items()
        ),
    )


def step_table(parts: Sequence[tuple[str, float]]) -> Table:
    """Return the seconds of a step's parts, which come as (name, seconds)."""
    step = sum(seconds for _, seconds in parts) or 1.0
    return Table(
        name="step-parts",
        header=("part of the step", "time", "share"),
        rows=tuple(
            (Cell.words(name), Cell.seconds(seconds), Cell.share(seconds / step))
            for name, seconds in parts
        ),
        is_narrow=True,
    )
