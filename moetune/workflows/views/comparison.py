"""Two plans or two profiles side by side, as sections."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.throughput import throughput_of
from moetune.domain.training_document import AnyPlan, TrainingDocument
from moetune.domain.units import format_seconds
from moetune.report.fits import overlay_figure
from moetune.report.operations import OperationCurve, operations_of
from moetune.report.plan_figures import degree_figure, phases_figure
from moetune.report.section import Figure, Section, plural, sentence
from moetune.workflows.plan_changes import compare_plans, input_changes, step_seconds
from moetune.workflows.profile_quality import quality_of
from moetune.workflows.profiles import compare_profiles
from moetune.workflows.subjects.layer import LayerSubject
from moetune.workflows.training_whatif import TrainingWhatIf
from moetune.workflows.views.decision import plan_decision
from moetune.workflows.views.differences import differences_section
from moetune.workflows.views.figures import layer_figures
from moetune.workflows.views.first_words import binding_words
from moetune.workflows.views.profile import machine_scope
from moetune.workflows.views.training_page import (
    compare_training,
    training_figures,
    training_scope,
)
from moetune.workflows.views.words import (
    KIND_WORDS,
    kind_of,
    plan_name,
    plan_scope,
    speed_words,
    suspect_words,
)
from moetune.workflows.whatif import WhatIfAnswer

_MOST_OVERLAYS = 6
_NOW, _CHANGED = "now", "changed"
_KINDS = {"collective": "Collectives", "GEMM": "GEMMs", "copy": "Copies"}


def comparison_sections(
    first: AnyPlan, second: AnyPlan, *, names: tuple[str, str]
) -> tuple[Section, ...]:
    """Return how the second plan differs from the first: in words, in figures, and field by field.

    Args:
        names: the plans' names in figures and tables.
    """
    plans = {
        name: one for name, one in zip(names, (first, second), strict=True) if isinstance(one, Plan)
    }
    figures: tuple[Figure, ...] = ()
    if first.id != second.id and len(plans) == len(names):
        figures = phases_figure(plans), degree_figure(plans)
    if isinstance(first, TrainingDocument) and isinstance(second, TrainingDocument):
        figures = tuple(training_figures({names[0]: first, names[1]: second}))
    words, differences = difference_sections(first, second, names=names)
    return words, Section(name="both", figures=figures), differences


def difference_sections(
    first: AnyPlan, second: AnyPlan, *, names: tuple[str, str]
) -> tuple[Section, Section]:
    """Return how the second plan differs from the first: in words, then field by field."""
    words = Section(
        name="answer",
        doubts=tuple(dict.fromkeys(_doubts(first, second))),
        paragraphs=tuple(_words(first, second, names)),
    )
    return words, plan_differences(first, second, names=names)


def _doubts(*plans: AnyPlan) -> Iterator[str]:
    for plan in plans:
        yield from suspect_words(plan.inputs.profile, plan.profile_quality)


def _words(first: AnyPlan, second: AnyPlan, names: tuple[str, str]) -> Iterator[str]:
    """Yield the answer: both steps, then the inputs, then what the second plan decides."""
    if first.id == second.id:
        yield f"{names[0]} and {names[1]} are the same plan."
        return
    for name, plan in zip(names, (first, second), strict=True):
        yield f"{name} is the plan of {KIND_WORDS[kind_of(plan)]}, {_of(plan)}."
    if isinstance(first, TrainingDocument) and isinstance(second, TrainingDocument):
        yield from compare_training(first, second, names)
        return
    if (
        not isinstance(first, Plan)
        or not isinstance(second, Plan)
        or kind_of(first) != kind_of(second)
    ):
        yield "Their steps are not of the same work, so that their times are not compared."
        return
    if changed := ", ".join(input_changes(first.inputs, second.inputs)):
        yield f"{names[1]} has {changed}."
    if first.inputs.profile_fingerprint != second.inputs.profile_fingerprint:
        was, now = first.inputs.profile, second.inputs.profile
        yield (
            f"The profile is {now} instead of {was}."
            if was != now
            else f"The profile {now} has changed in between."
        )
    yield from compare_plans(first, second)


def _of(plan: AnyPlan) -> str:
    if isinstance(plan, TrainingDocument):
        inputs, step = plan.inputs, format_seconds(plan.best.predicted.step_seconds)
        return f"{inputs.model}: {step} a step, {training_scope(plan)}"
    return f"{plan_name(plan)}: {format_seconds(step_seconds(plan))} a step, {plan_scope(plan)}"


def machine_sections(
    first: Profile, second: Profile, *, names: tuple[str, str], is_drawn: bool = False
) -> tuple[Section, ...]:
    """Return every number and fact in which two profiles differ.

    Args:
        names: the profiles' names in figures and tables.
        is_drawn: add figures of the operations that both have.
    """
    found = [(one.key, one.first, one.second) for one in compare_profiles(first, second)]
    differences = differences_section(found, names=names)
    if not is_drawn:
        return (differences,)
    words, figures = _machine_words(first, second, names), _overlays(first, second, names)
    return Section(name="both", paragraphs=tuple(words), figures=tuple(figures)), differences


def _machine_words(first: Profile, second: Profile, names: tuple[str, str]) -> Iterator[str]:
    """Yield how good both profiles are, and how much slower each kind of operation is."""
    labels = ["of unknown quality" if one is None else one.label
              for one in (quality_of(first), quality_of(second))]  # fmt: skip
    yield f"{names[0]} is {labels[0]}, {names[1]} is {labels[1]}."
    if first.machine != second.machine:
        yield f"{names[0]}: {machine_scope(first)}. {names[1]}: {machine_scope(second)}."
    ratios: dict[str, list[float]] = {}
    for one, other in _pairs(first, second):
        if one.line and other.line and one.line.beta_seconds:
            ratio = other.line.beta_seconds / one.line.beta_seconds
            ratios.setdefault(_KINDS.get(one.kind, one.kind), []).append(ratio)
    for kind, found in ratios.items():
        yield (
            f"{kind} of a large size take {statistics.median(found):.2f} × as long on {names[1]}, "
            f"by the median of {plural(len(found), 'operation')}."
        )


def whatif_sections(answer: WhatIfAnswer, *, is_drawn: bool = False) -> tuple[Section, ...]:
    """Return the changes, their effects on the plan, and the reasons.

    Args:
        is_drawn: add figures of both plans, and every field in which they differ.
    """
    changes, step, *effects = answer.words
    words = Section(
        name="answer",
        title=sentence(changes),
        doubts=tuple(suspect_words(answer.before.inputs.profile, answer.after.profile_quality)),
        paragraphs=(
            sentence(step),
            plan_decision(answer.after),
            *_speeds(answer),
            *map(sentence, effects),
        ),
    )
    if not is_drawn:
        return (words,)
    plans = {_NOW: answer.before, _CHANGED: answer.after}
    explained = LayerSubject(plan=answer.after, profile=answer.profile)
    drawn = tuple(layer_figures(explained))
    changed = (replace(one, title=f"{one.title}, changed") for one in drawn)
    return (
        words,
        Section(name="both", figures=(phases_figure(plans), degree_figure(plans), *changed)),
        plan_differences(answer.before, answer.after, names=(_NOW, _CHANGED)),
    )


def training_whatif_sections(
    answer: TrainingWhatIf, *, is_drawn: bool = False
) -> tuple[Section, ...]:
    """Return the changes of a training's plan and their effects.

    Args:
        is_drawn: as of `whatif_sections`.
    """
    changes, step, *effects = answer.words
    before, after = answer.before, answer.after
    words = Section(
        name="answer",
        title=sentence(changes),
        doubts=tuple(suspect_words(after.inputs.profile, after.profile_quality)),
        paragraphs=(
            step, *effects, binding_words(after.best),
            *(sentence(one) for one in after.warnings if one not in before.warnings),
        ),
    )  # fmt: skip
    if not is_drawn:
        return (words,)
    figures = tuple(training_figures({_NOW: before, _CHANGED: after}))
    differences = plan_differences(before, after, names=(_NOW, _CHANGED))
    return words, Section(name="both", figures=figures), differences


def _speeds(answer: WhatIfAnswer) -> Iterator[str]:
    """Yield the model FLOPs a second of the changed plan, and of the first one."""
    now, then = throughput_of(answer.after), throughput_of(answer.before)
    if now is not None and then is not None:
        new, old = speed_words(now), speed_words(then)
        yield f"Model FLOPs: {new}, {'as before' if new == old else f'instead of {old}'}."


def plan_differences(first: AnyPlan, second: AnyPlan, *, names: tuple[str, str]) -> Section:
    """Return every field in which two plan documents differ, except for alternatives and terms.

    Lists of ranges, parts and stages are compared by their lengths.
    """
    is_apart = _is_apart(first, second)
    left, right = (dict(_fields(plan, is_apart=is_apart)) for plan in (first, second))
    keys = list(dict.fromkeys([*left, *right]))
    return differences_section(
        [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)],
        names=names,
    )


def _overlays(first: Profile, second: Profile, names: tuple[str, str]) -> Iterator[Figure]:
    for pair in _pairs(first, second)[:_MOST_OVERLAYS]:
        yield overlay_figure(*pair, names)


def _pairs(first: Profile, second: Profile) -> list[tuple[OperationCurve, OperationCurve]]:
    """Return the operations that both profiles have."""
    theirs = {one.name: one for one in operations_of(second)}
    return [(one, theirs[one.name]) for one in operations_of(first) if one.name in theirs]


def _is_apart(first: AnyPlan, second: AnyPlan) -> bool:
    """Return whether two plans of trainings have their fullest device on other pipeline ranks."""
    if not isinstance(first, TrainingDocument) or not isinstance(second, TrainingDocument):
        return False
    return (first.layout.pp, first.memory.rank) != (second.layout.pp, second.memory.rank)


def _fields(plan: AnyPlan, *, is_apart: bool) -> Iterator[tuple[str, object]]:
    """Yield a plan's fields by key.

    Args:
        is_apart: omit parts of memory, which are of another pipeline rank in the other plan.
    """
    if isinstance(plan, TrainingDocument):
        shown = {
            **plan.document,
            "predicted": {
                **encode(plan.predicted), "parts": {}, "mean_parts": encode(plan.best.mean_parts),
            },
            "memory": encode(plan.memory) | ({"parts": {}, "activations": {}} if is_apart else {}),
        }  # fmt: skip
        for part in ("inputs", "layout", "predicted", "memory", "confidence", "fits", "trust"):
            yield from _flat(part, shown[part])
        return
    document = encode(plan)
    for part in ("inputs", "layout", "pipeline", "memory", "predicted"):
        yield from _flat(part, document[part])
    yield "placement", _placement(plan)
    verdict = document["decision"]
    for key in ("probability_best", "expected_regret", "binding"):
        yield f"decision.{key}", verdict[key]


def _placement(plan: Plan) -> str | None:
    if not plan.experts or plan.placement is None:
        return None
    return "by loads"


def _flat(where: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{where}.{key}", item)
    elif isinstance(value, list):
        is_long = where.endswith(("ranges", "parts", "stages"))
        yield (
            where,
            plural(len(value), "entry", "entries") if is_long else ", ".join(map(str, value)),
        )
    else:
        yield where, value
