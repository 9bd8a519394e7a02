"""A plan in a few words: what it is for, what to do, and the numbers that matter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.model import MODELS
from moetune.domain.plan import Alternative, Plan, TransformerPlan
from moetune.domain.terms import PhaseTerms
from moetune.domain.units import format_bytes, format_seconds
from moetune.report import section as tables
from moetune.report.section import Cell, Picture, Table
from moetune.solve.layer.memory import total_bytes
from moetune.solve.layer.words import HOW, count_chunks
from moetune.solve.layout.words import WORDS, name_layout
from moetune.workflows.explain import Explanation
from moetune.workflows.figures import choice_name, plan_pictures

SURE = 0.995
WORTH_SAYING = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Highlight:
    """One number that matters, and what to hold it against."""

    name: str
    value: str
    note: str = ""


def plan_name(plan: Plan) -> str:
    """Return "GPT-XL", or what a layer without a name is."""
    model = MODELS.get(plan.inputs.model or "")
    if model is not None:
        return model.title
    layer = plan.inputs.layer
    return f"MoE layer {layer.d_model} × {layer.d_hidden}"


def plan_scope(plan: Plan) -> str:
    """Return "64 experts on 64 ranks · 8,192 tokens per rank · bfloat16"."""
    inputs = plan.inputs
    each = "on every rank" if plan.layout.expert_parallel == "tensor" else "per rank"
    return (
        f"{_count(inputs.layer.num_experts, 'expert')} on {_count(inputs.world_size, 'rank')} · "
        f"{_count(inputs.tokens_per_rank, 'token')} {each} · {inputs.dtype}"
    )


def plan_answer(plan: Plan) -> str:
    """Return what to do, in one sentence."""
    pipeline, strategy = plan.pipeline, plan.memory.strategy
    if plan.transformer is not None:
        return f"Lay the model out as {name_layout(plan.layout)}."
    chunks = "Leave the tokens in one chunk, forward and backward"
    if max(pipeline.forward_degree, pipeline.backward_degree) > 1:
        chunks = (
            f"Cut the tokens into {count_chunks(pipeline.forward_degree)} forward and "
            f"{pipeline.backward_degree} backward"
        )
    if plan.layout.expert_parallel == "tensor":
        return f"{chunks}."
    kept = "keep all activations" if strategy == "none" else f"reuse memory ({HOW[strategy]})"
    return f"{chunks}, and {kept}."


def plan_highlights(explanation: Explanation) -> tuple[Highlight, ...]:
    """Return the numbers to read first: time, gain, memory, what binds, how sure."""
    plan = explanation.plan
    if plan.transformer is not None:
        return _model_highlights(explanation, plan.transformer)
    times, verdict = plan.predicted, plan.decision
    step = times.step_seconds
    gain = f"{times.sequential_step_seconds / step:.2f} ×" if step else "–"
    sure = verdict.probability_best
    regret = f"if wrong, {100 * verdict.expected_regret:.1f} % slower"
    return (
        Highlight(
            name="One step of the layer",
            value=format_seconds(step),
            note=f"{format_seconds(times.p05_step_seconds)} to "
            f"{format_seconds(times.p95_step_seconds)}",
        ),
        Highlight(name="Against one chunk", value=gain, note="as fast"),
        Highlight(
            name="Memory of one device",
            value=format_bytes(total_bytes(plan.memory)),
            note=_of_limit(explanation),
        ),
        Highlight(
            name="What binds", value=verdict.binding.capitalize(), note=f"{times.trust} costs"
        ),
        Highlight(
            name="No other choice is better",
            value="over 99 %" if sure >= SURE else f"{100 * sure:.0f} %",
            note=regret if verdict.expected_regret >= WORTH_SAYING else "of refits agree",
        ),
    )


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    start = text[:1].upper() if text[:2].isalpha() else text[:1]
    return start + text[1:] + ("" if text.endswith((".", "`")) else ".")


def _model_highlights(explanation: Explanation, whole: TransformerPlan) -> tuple[Highlight, ...]:
    count = whole.num_micro_batches
    return (
        Highlight(name="One step of the model", value=format_seconds(whole.step_seconds)),
        Highlight(
            name="Tokens a second",
            value=f"{whole.tokens_per_second_per_rank:,.0f}",
            note="on each rank",
        ),
        Highlight(
            name="Memory of one device",
            value=format_bytes(whole.memory.total_bytes),
            note=_of_limit(explanation),
        ),
        Highlight(name="What binds", value=WORDS[whole.binding].capitalize()),
        Highlight(
            name="Micro-batches",
            value=f"{count:,}",
            note=f"of {_count(whole.micro_batch_sequences, 'sequence')}",
        ),
    )


def _of_limit(explanation: Explanation) -> str:
    limit = explanation.memory_limit_bytes
    return f"of {format_bytes(limit)}" if limit else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan with everything that is shown of it.

    Args:
        remarks: warnings, and why terms are missing.
    """

    plan: Plan
    name: str
    scope: str
    answer: str
    highlights: tuple[Highlight, ...]
    why: str
    remarks: tuple[str, ...]
    pictures: tuple[Picture, ...]
    tables: tuple[Table, ...]


def view_plan(explanation: Explanation) -> PlanView:
    """Return a plan's view; with its profile the terms, the timeline and the strategies."""
    plan = explanation.plan
    remarks = [*plan.warnings, *([explanation.note] if explanation.note else [])]
    found = (
        _layouts(plan), _phases(explanation), _chunks(plan, explanation), _strategies(explanation),
        _constraints(plan),
    )  # fmt: skip
    return PlanView(
        plan=plan,
        name=plan_name(plan),
        scope=plan_scope(plan),
        answer=plan_answer(plan),
        highlights=plan_highlights(explanation),
        why=plan.decision.why,
        remarks=tuple(map(sentence, remarks)),
        pictures=plan_pictures(explanation),
        tables=tuple(table for table in found if table is not None),
    )


def _phases(explanation: Explanation) -> Table | None:
    forward, backward = explanation.forward, explanation.backward
    if forward is None or backward is None:
        return None
    rows = (("forward", forward), ("backward", backward))
    return Table(
        name="phases-terms",
        title="What the time consists of" + _of_layer(explanation.plan),
        header=(
            "phase", "chunks", "one transfer", "one chunk's experts", "all experts", "exposed",
            "hidden", "planned",
        ),
        rows=tuple((tables.text(name), *_terms(terms)) for name, terms in rows),
        right=tables.columns(1, 2, 3, 4, 5, 6, 7),
    )  # fmt: skip


def _terms(terms: PhaseTerms) -> Iterator[Cell]:
    yield tables.count(terms.degree)
    for number in (
        terms.transfer_seconds, terms.compute_seconds, terms.total_compute_seconds,
        terms.exposed_communication_seconds, terms.hidden_seconds, terms.seconds,
    ):  # fmt: skip
        yield tables.seconds(number)


def _layouts(plan: Plan) -> Table | None:
    whole = plan.transformer
    if whole is None:
        return None
    return _lost(
        "layouts", "Layouts that lost, and why",
        [one for one in plan.alternatives if one.layout], plan, whole.step_seconds,
    )  # fmt: skip


def _chunks(plan: Plan, explanation: Explanation) -> Table:
    """Return what lost among the chunks; other strategies have a table of their own."""
    listed = {one.strategy for one in explanation.strategies} - {plan.memory.strategy}
    others = [one for one in plan.alternatives if one.layout is None and one.strategy not in listed]
    return _lost(
        "alternatives", f"Chunks that lost{_of_layer(plan)}, and why", others, plan,
        plan.predicted.step_seconds,
    )  # fmt: skip


def _of_layer(plan: Plan) -> str:
    """Return what a title says where the plan is for more than the layer."""
    return "" if plan.transformer is None else " in one MoE layer"


def _lost(
    name: str, title: str, others: Sequence[Alternative], plan: Plan, step_seconds: float
) -> Table:
    """Return alternatives beside the chosen step."""
    memory = ("memory",) if any(one.memory_bytes for one in others) else ()
    return Table(
        name=name,
        title=title,
        header=("choice", "step", "slower by", *memory, "why it lost"),
        rows=tuple(
            (
                tables.text(choice_name(one, plan)),
                tables.seconds(one.step_seconds),
                _slower(one.step_seconds, step_seconds),
                *(tables.size(one.memory_bytes) for _ in memory),
                tables.text(sentence(one.lost_because)),
            )
            for one in others
        ),
        right=tables.columns(1, 2, *(3 for _ in memory)),
        empty="The bounds leave no other choice.",
    )


def _slower(seconds: float, best: float) -> Cell:
    return tables.share(seconds / best - 1, sign=True) if best else Cell(text="")


def _strategies(explanation: Explanation) -> Table | None:
    if not explanation.strategies:
        return None
    return Table(
        name="strategies",
        title="Ways to keep activations",
        header=("strategy", "how", "chunks", "step", "device", "peak", "host", "why it lost"),
        rows=tuple(
            (
                tables.text(one.strategy, mark="chosen" if one.is_chosen else ""),
                tables.text(sentence(HOW[one.strategy])),
                tables.text(f"{one.forward_degree} and {one.backward_degree}"),
                tables.seconds(one.step_seconds),
                tables.size(one.needed_bytes),
                tables.size(one.peak_bytes),
                tables.size(one.host_bytes or None),
                tables.text("The plan." if one.is_chosen else sentence(one.lost_because)),
            )
            for one in explanation.strategies
        ),
        right=tables.columns(3, 4, 5, 6),
    )


def _constraints(plan: Plan) -> Table | None:
    rows = sorted(plan.inputs.constraints.items())
    return tables.facts("Pinned or bounded", rows, name="constraints") if rows else None
