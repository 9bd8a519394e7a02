"""How two plans differ, in words: their inputs, what was decided, and why."""

import math
from collections.abc import Iterator

from moetune.domain.constraint_texts import ALLOW_MODELLED, constraint_words
from moetune.domain.plan import Plan
from moetune.domain.request import PlanInputs
from moetune.domain.training_document import AnyPlan, TrainingDocument
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.fit.scaled import Speeds
from moetune.solve.layer.memory import device_bytes as layer_bytes
from moetune.solve.layer.words import STRATEGY_WORDS

_SAME = 5e-4
_TWICE = 2.0


def name_changes(before: PlanInputs, after: PlanInputs, speeds: Speeds) -> str:
    """Return the changes in words: "With 32,768 tokens per rank instead of 8,192."."""
    named = [
        *input_changes(before, after),
        *(f"{part} {factor:g} × as fast as measured" for part, factor in speeds.changed.items()),
    ]
    if not named:
        return "The plan is already made for these inputs."
    text = ", ".join(named)
    return f"{text[0].upper()}{text[1:]}." if text.startswith("without ") else f"With {text}."


def input_changes(before: PlanInputs, after: PlanInputs) -> Iterator[str]:
    """Yield the inputs that differ, apart from the profile: "8 ranks instead of 4"."""
    yield from _changed_sizes(before, after)
    yield from _changed_constraints(before, after)


def compare_plans(before: Plan, after: Plan) -> Iterator[str]:
    """Yield sentences on how the second plan differs and why, the most important first."""
    yield _step(before, after)
    yield _chunks(before, after)
    yield from _strategy(before, after)
    yield from _placement(before, after)
    yield _binding(before, after)
    yield _memory(before, after)
    yield _sentence(after.decision.why)
    if after.predicted.trust != before.predicted.trust:
        was = before.predicted.trust
        yield f"The times are {after.predicted.trust}, those of the first plan {was}."
    for warning in after.warnings:
        if warning not in before.warnings:
            yield _sentence(warning)


def step_seconds(plan: AnyPlan) -> float:
    """Return the predicted seconds of a step."""
    if isinstance(plan, TrainingDocument):
        return plan.best.predicted.step_seconds
    return plan.predicted.step_seconds


def needed_bytes(plan: AnyPlan) -> int:
    """Return the bytes of the device that needs the most."""
    if isinstance(plan, TrainingDocument):
        return plan.best.memory.peak_bytes
    return layer_bytes(plan.memory)


def _changed_sizes(before: PlanInputs, after: PlanInputs) -> Iterator[str]:
    then, now = _subject(before), _subject(after)
    if now != then:
        yield f"{now} instead of {then}"
    if after.world_size != before.world_size:
        yield f"{after.world_size:,} ranks instead of {before.world_size:,}"
    if after.layer.num_experts != before.layer.num_experts:
        yield f"{after.layer.num_experts:,} experts instead of {before.layer.num_experts:,}"
    if after.tokens_per_rank != before.tokens_per_rank:
        yield f"{after.tokens_per_rank:,} tokens per rank instead of {before.tokens_per_rank:,}"
    if after.dtype != before.dtype:
        yield f"{after.dtype} instead of {before.dtype}"
    if after.memory_limit_bytes != before.memory_limit_bytes:
        now, then = (_limit(one.memory_limit_bytes) for one in (after, before))
        yield f"{now} of a device's memory instead of {then}"


def _subject(inputs: PlanInputs) -> str:
    return inputs.model or f"layers {inputs.layer.d_model:,} × {inputs.layer.d_hidden:,}"


def _changed_constraints(before: PlanInputs, after: PlanInputs) -> Iterator[str]:
    then, now = before.constraints, after.constraints
    for flag in dict.fromkeys((*then, *now)):
        if flag == ALLOW_MODELLED:
            continue  # the plan's warnings say what was estimated
        if flag not in now:
            yield f"without --{flag} {constraint_words(flag, then[flag])}"
        elif now[flag] != then.get(flag):
            was = f" instead of {constraint_words(flag, then[flag])}" if flag in then else ""
            yield f"--{flag} {constraint_words(flag, now[flag])}{was}"


def _step(before: Plan, after: Plan) -> str:
    then, now = step_seconds(before), step_seconds(after)
    text = f"A step takes {format_seconds(now)}"
    if _is_same(now, then):
        text += ", as before"
    else:
        text += f" instead of {format_seconds(then)}, {_ratio(now, then)}"
    tokens_then, tokens_now = (one.inputs.tokens_per_rank for one in (before, after))
    if tokens_now != tokens_then:
        text += f"; for each token {_ratio(now / tokens_now, then / tokens_then)}"
    return f"{text}."


def _chunks(before: Plan, after: Plan) -> str:
    (forward, backward), (was_forward, was_backward) = (
        (one.pipeline.forward_degree, one.pipeline.backward_degree) for one in (after, before)
    )
    if (forward, backward) == (was_forward, was_backward):
        return f"The chunks are {forward} forward and {backward} backward, as before."
    return (
        f"The chunks are {forward} forward and {backward} backward instead of "
        f"{was_forward} and {was_backward}."
    )


def _strategy(before: Plan, after: Plan) -> Iterator[str]:
    then, now = before.memory.strategy, after.memory.strategy
    if now != then:
        yield f"The strategy is {now} instead of {then}: {STRATEGY_WORDS[now]}."


def _placement(before: Plan, after: Plan) -> Iterator[str]:
    if after.experts == before.experts:
        return
    now, then = _where_experts_are(after), _where_experts_are(before)
    yield f"Experts are {now} instead of {'by other loads' if then == now else then}."


def _where_experts_are(plan: Plan) -> str:
    if not plan.experts or plan.placement is None:
        return "in their order"
    return "placed by their loads"


def _binding(before: Plan, after: Plan) -> str:
    then, now = before.decision.binding, after.decision.binding
    start = f"{now[:1].upper()}{now[1:]}"
    return f"{start} still takes most." if now == then else f"{start} binds instead of {then}."


def _memory(before: Plan, after: Plan) -> str:
    then, now = (format_bytes(needed_bytes(one)) for one in (before, after))
    same = "as before" if now == then else f"instead of {then}"
    return f"A device needs {now} of memory, {same}."


def _limit(limit_bytes: int | None) -> str:
    return "all" if limit_bytes is None else format_bytes(limit_bytes)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _is_same(now: float, then: float) -> bool:
    return abs(now - then) <= _SAME * then


def _ratio(now: float, then: float) -> str:
    """Return "1.5 % less", "the same" or "2.4 × as long"."""
    if _is_same(now, then):
        return "the same"
    ratio = now / then if then else math.inf
    if 1 / _TWICE < ratio < _TWICE:
        return f"{format_share(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"
    return f"{ratio:.3g} × as long"
