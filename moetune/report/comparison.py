"""Sentences on how two plans of a kind differ: the question, the step, the choice, its memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moetune.domain.any_plan import AnyPlan
from moetune.domain.budget import Budget
from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.request import constraint_words
from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import (
    format_amount,
    format_bytes,
    format_days,
    format_seconds,
    format_share,
    format_train_tokens,
)
from moetune.report.section import sentence

WHATIF_SCHEMA = "moetune.whatif/1"
_SAME = 5e-4
_TWICE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """Both plans and their differences; the second plan is not stored."""

    before: AnyPlan
    after: AnyPlan

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences on the differences: first the changes, then the effects by importance."""
        changed = ", ".join(changed_inputs(self.before, self.after))
        title = f"{'' if changed.startswith('without ') else 'with '}{changed}"
        title = title if changed else "the plan is already made for these inputs"
        return sentence(title), *compare(self.before, self.after)

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune whatif` and of the service."""
        plans = {"before": encode(self.before), "after": encode(self.after)}
        return {"schema": WHATIF_SCHEMA, **plans, "words": list(self.words)}


def compare(before: AnyPlan, after: AnyPlan) -> Iterator[str]:
    """Yield sentences on how the second plan differs, the most important first."""
    yield _step(before, after)
    yield f"It takes {after.words}{_instead(before.words, after.words)}."
    places = {True: "placed by their loads", False: "in their order"}
    was, now = places[before.is_placed], places[after.is_placed]
    if was != now:
        yield f"Its experts are {now} instead of {was}."
    yield from _run(before, after)
    was, now = (format_bytes(plan.needed_bytes) for plan in (before, after))
    yield f"A device needs {now} of memory{_instead(was, now)}."
    if after.trust != before.trust:
        yield f"The times are {after.trust}, those of the first plan {before.trust}."
    was_factor, factor = (
        plan.factor if plan.kind == "training" else 1.0 for plan in (before, after)
    )
    if was_factor != factor:
        yield (
            f"Its times have the factor {factor:.2f} of a calibration by observed runs, those of "
            f"the first plan {was_factor:.2f}."
        )
    yield from (sentence(warning) for warning in after.warnings if warning not in before.warnings)


def changed_inputs(before: AnyPlan, after: AnyPlan) -> Iterator[str]:
    """Yield how the second plan's question differs: "8 ranks instead of 4", "--tp 2"."""
    then, now = _asked(before), _asked(after)
    for key in dict.fromkeys((*then, *now)):
        if key not in now:
            yield f"without {key.format(then[key])}"
        elif now[key] != then.get(key):
            yield key.format(now[key]) + (f" instead of {then[key]}" if key in then else "")
    prints = {plan.inputs.profile_fingerprint for plan in (before, after)} - {""}
    if before.inputs.profile == after.inputs.profile and len(prints) > 1:
        yield f"profile {after.inputs.profile} as it is now"


def _asked(plan: AnyPlan) -> Mapping[str, str]:
    """Return a plan's inputs in words, keyed by the format string that prints each input."""
    inputs, limit = plan.inputs, plan.inputs.memory_limit_bytes
    named = _of_model(plan) if plan.kind == "training" else _of_layer(plan)
    return {
        "{}": inputs.model or "",
        "{} ranks": f"{inputs.world_size:,}",
        "profile {}": inputs.profile,
        "dtype {}": inputs.dtype,
        "{} of a device's memory": "all" if limit is None else format_bytes(limit),
        **named,
    }


def _of_layer(plan: Plan) -> Mapping[str, str]:
    inputs, layer = plan.inputs, plan.inputs.layer
    return {
        **({} if inputs.model else {"{}": f"layers {layer.d_model:,} × {layer.d_hidden:,}"}),
        "{} experts": f"{layer.num_experts:,}",
        "{} tokens per rank": f"{inputs.tokens_per_rank:,}",
        **{
            f"--{flag} {{}}": constraint_words(flag, value)
            for flag, value in inputs.constraints.items()
            if flag != "allow-modelled"  # the plan's warnings say what was estimated
        },
    }


def _of_model(plan: TrainingDocument) -> Mapping[str, str]:
    inputs = plan.inputs
    return {
        "{} sequences": f"{inputs.global_batch:,}",
        "{} tokens of a sequence": f"{inputs.seq:,}",
        "target {}": inputs.runtime,
        "optimizer {}": inputs.optimizer,
        "routing {}": inputs.routing,
        **_of_budget(inputs.budget),
        "train {}": inputs.tuning.words,
        **{f"{flag} {{}}": value for flag, value in inputs.pins.flags.items()},
    }


def _of_budget(budget: Budget | None) -> Mapping[str, str]:
    if budget is None:
        return {}
    price, share = budget.price_per_gpu_hour, format_share(budget.utilization, digits=0)
    return {
        "{} tokens of the whole training": format_train_tokens(budget.train_tokens),
        "utilization {}": share,
        **({} if price is None else {"{} a GPU-hour": f"{price:g}"}),
    }


def _step(before: AnyPlan, after: AnyPlan) -> str:
    now, then = after.step_seconds, before.step_seconds
    ratio = now / then if then else math.inf if now else 1.0
    how = f"{ratio:.3g} × as long"
    if 1 / _TWICE < ratio < _TWICE:
        how = f"{format_share(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"
    was = f" instead of {format_seconds(then)}, {how}" if _differs(ratio) else ", as before"
    words = f"A step takes {format_seconds(now)}{was}"
    rates = [(plan.tokens_per_second or 0.0) / plan.inputs.world_size for plan in (after, before)]
    if rates[1] and _differs(rates[0] * ratio / rates[1]):  # of other work on a device
        words += "; {:,.0f} tokens a second and device instead of {:,.0f}".format(*rates)
    return f"{words}."


def _run(before: AnyPlan, after: AnyPlan) -> Iterator[str]:
    """Yield days and cost of the whole training if both plans know its tokens."""
    if before.kind != "training" or after.kind != "training" or not (before.run and after.run):
        return
    was, now = (format_days(plan.run.days.predicted) for plan in (before, after) if plan.run)
    yield f"The whole training takes {now}{_instead(was, now)}."
    costs = [plan.run.cost.predicted for plan in (before, after) if plan.run and plan.run.cost]
    if len(costs) > 1:
        was, now = map(format_amount, costs)
        yield f"It costs {now}{_instead(was, now)}."


def _differs(ratio: float) -> bool:
    return abs(ratio - 1) > _SAME


def _instead(was: str, now: str) -> str:
    return ", as before" if now == was else f" instead of {was}"
