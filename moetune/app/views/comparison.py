"""Two plans or two profiles side by side, as sections, with every field that differs."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from moetune.app.compare import asked_otherwise, compare
from moetune.app.profile_quality import quality_of
from moetune.app.profiles import compare_profiles
from moetune.app.views.model import training_figures
from moetune.app.views.model_words import binding_words
from moetune.app.views.profile import machine_scope
from moetune.app.views.words import plan_scope, suspect_words
from moetune.app.whatif import WhatIfAnswer
from moetune.domain.any_plan import AnyPlan
from moetune.domain.constraint_texts import constraint_words
from moetune.domain.profile import Profile
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.fits import overlay_figure
from moetune.report.operations import OperationCurve, operations_of
from moetune.report.plan_figures import degree_figure, phases_figure
from moetune.report.section import EMPTY, Cell, Figure, Section, Table, percent, plural, sentence

_MOST_OVERLAYS = 6
_CHANGES = "now", "changed"
_OF_A_RANK = "memory.parts.", "memory.activations."
_KINDS = {"collective": "Collectives", "GEMM": "GEMMs", "copy": "Copies"}
_SMALL, _LARGE = 0.01, 100
_TIMES = ("predicted.parts.", "predicted.mean_parts.")
_SHARES = ("probability_best", "expected_regret", ".mfu", "_ratio")
_RATES = {"_per_byte": (1e9, "GB"), "_per_mac": (1e12, "TMAC"), "_per_element": (1e9, "G")}
_UNITS: tuple[tuple[Callable[[str], bool], Callable[[float], str]], ...] = (
    (lambda key: key.endswith("_bytes") or key.startswith(_OF_A_RANK), format_bytes),
    (lambda key: key.endswith("_seconds") or key.startswith(_TIMES), format_seconds),
    (
        lambda key: key.endswith("flops_per_second_per_device"),
        lambda value: f"{value / 1e12:,.3g} TFLOP/s",
    ),
    (lambda key: key.endswith(_SHARES), percent),
    (lambda key: "tokens_per_second" in key, lambda value: f"{value:,.0f}"),
)
"""Units of a field's number, by its key."""


def comparison_sections(
    first: AnyPlan, second: AnyPlan, *, names: tuple[str, str], is_drawn: bool = False
) -> tuple[Section, ...]:
    """Return how the second plan differs from the first: in words, and field by field.

    Args:
        names: the plans' names in figures and tables.
        is_drawn: add figures of both plans.
    """
    doubts = (words for plan in (first, second) for words in suspect_words(plan))
    words = Section(
        name="answer",
        doubts=tuple(dict.fromkeys(doubts)),
        paragraphs=tuple(_words(first, second, names)),
    )
    return words, *_beside(first, second, names, is_drawn=is_drawn)


def _words(first: AnyPlan, second: AnyPlan, names: tuple[str, str]) -> Iterator[str]:
    """Yield the answer: both steps, then the inputs, then what the second plan decides."""
    if first.id == second.id:
        yield f"{names[0]} and {names[1]} are the same plan."
        return
    for name, plan in zip(names, (first, second), strict=True):
        step = f"{format_seconds(plan.step_seconds)} a step, {plan_scope(plan)}"
        yield f"{name}: {plan.name}, {step}."
    if first.kind != second.kind:
        yield "Their steps are not of the same work, so that their times are not compared."
        return
    if changed := ", ".join(asked_otherwise(first, second)):
        yield f"{names[1]} has {changed}."
    yield from compare(first, second)


def whatif_sections(answer: WhatIfAnswer, *, is_drawn: bool = False) -> tuple[Section, ...]:
    """Return the changes, their effects on the plan, and the reason.

    Args:
        is_drawn: add figures of both plans, and every field in which they differ.
    """
    changes, *effects = answer.words
    after = answer.after
    words = Section(
        name="answer",
        title=changes,
        doubts=suspect_words(after, answer.before.inputs.profile),
        paragraphs=(*effects, sentence(_reason(after))),
    )
    beside = _beside(answer.before, after, _CHANGES, is_drawn=True) if is_drawn else ()
    return words, *beside


def _reason(plan: AnyPlan) -> str:
    return binding_words(plan.best) if plan.kind == "training" else plan.decision.why


def _beside(
    first: AnyPlan, second: AnyPlan, names: tuple[str, str], *, is_drawn: bool
) -> Iterator[Section]:
    """Yield both plans' figures, and every field in which they differ."""
    if is_drawn:
        plans = dict(zip(names, (first, second), strict=True))
        figures = () if first.id == second.id else compared_figures(plans)
        yield Section(name="both", figures=figures)
    left, right = (dict(_flat("", plan.fields)) for plan in (first, second))
    if any(left.get(key) != right.get(key) for key in ("layout.pp", "memory.rank")):
        for found in (left, right):  # parts are those of another pipeline rank
            for key in [key for key in found if key.startswith(_OF_A_RANK)]:
                del found[key]
    yield differences_section(
        [
            (key, left.get(key), right.get(key))
            for key in dict.fromkeys((*left, *right))
            if left.get(key) != right.get(key)
        ],
        names=names,
    )


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


def _overlays(first: Profile, second: Profile, names: tuple[str, str]) -> Iterator[Figure]:
    for pair in _pairs(first, second)[:_MOST_OVERLAYS]:
        yield overlay_figure(*pair, names)


def _pairs(first: Profile, second: Profile) -> list[tuple[OperationCurve, OperationCurve]]:
    """Return the operations that both profiles have."""
    theirs = {one.name: one for one in operations_of(second)}
    return [(one, theirs[one.name]) for one in operations_of(first) if one.name in theirs]


def _flat(where: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield values by key; lists of ranges, parts and stages are compared by their lengths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{where}.{key}" if where else key, item)
    elif isinstance(value, list):
        is_long = where.endswith(("ranges", "parts", "stages"))
        yield (
            where,
            plural(len(value), "entry", "entries") if is_long else ", ".join(map(str, value)),
        )
    else:
        yield where, value


def differences_section(
    found: Sequence[tuple[str, object, object]], *, names: tuple[str, str]
) -> Section:
    """Return every field with its two values and their ratio.

    Args:
        found: (key, first value, second value); the key's ending tells the unit.
        names: the headings of the values.
    """
    table = Table(
        name="differences",
        header=("", *names, "ratio"),
        rows=tuple(
            (
                Cell.words(key, mark="code"),
                _value(key, first),
                _value(key, second),
                _ratio(first, second),
            )
            for key, first, second in found
        ),
        empty=f"None: {names[0]} and {names[1]} are equal.",
    )
    return Section(name="differences", title="Differences", tables=(table,))


def _value(key: str, value: object) -> Cell:
    if value is None:
        return Cell(text="–")
    if key.endswith("_fingerprint"):
        return Cell(text=str(value)[:12], value=str(value), mark="code")
    if isinstance(value, bool):
        return Cell.words("yes" if value else "no")
    if not isinstance(value, int | float):
        return Cell.words(constraint_words(key.rpartition(".constraints.")[2], str(value)))
    return Cell(text=_number(key, value), value=value)


def _number(key: str, value: float) -> str:
    """Return a number in the unit that its key ends with."""
    for is_of, words in _UNITS:
        if is_of(key):
            return words(value)
    for ending, (factor, name) in _RATES.items():
        if key.endswith(ending):
            return f"{format_seconds(value * factor)} per {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(first: object, second: object) -> Cell:
    numbers = [one for one in (first, second) if isinstance(one, int | float)]
    if len(numbers) != len((first, second)) or not numbers[0]:
        return EMPTY
    ratio = numbers[1] / numbers[0]
    text = f"{ratio:,.{2 if ratio < _LARGE else 0}f} ×"
    if 0 < ratio < _SMALL:
        text = f"under {_SMALL} ×"
    return Cell(text=text, value=ratio, unit="1")


def compared_figures(plans: Mapping[str, AnyPlan]) -> tuple[Figure, ...]:
    """Return figures of plans of one kind side by side; none of a layer and a model."""
    models = {name: plan for name, plan in plans.items() if plan.kind == "training"}
    if len(models) == len(plans):
        return tuple(training_figures(models))
    if models:
        return ()
    layers = {name: plan.as_layer() for name, plan in plans.items()}
    return phases_figure(layers), degree_figure(layers)
