"""A plan in a few words: what it is for, what to do, and the numbers that matter."""

from dataclasses import dataclass

from moetune.domain.model_plan import TransformerPlan
from moetune.domain.models import MODELS
from moetune.domain.plan import Plan
from moetune.domain.units import format_bytes, format_seconds
from moetune.solve.layout_words import WORDS, name_layout
from moetune.solve.memory import total_bytes
from moetune.solve.words import HOW, count_chunks
from moetune.workflows.explain import Explanation

_SURE = 0.995
_WORTH_SAYING = 5e-4


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
            value="over 99 %" if sure >= _SURE else f"{100 * sure:.0f} %",
            note=regret if verdict.expected_regret >= _WORTH_SAYING else "of refits agree",
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
