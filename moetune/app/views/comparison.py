"""Two plans side by side, as sections, with every field that differs."""

from collections.abc import Callable, Iterator, Sequence

from moetune.app.compare import changed_inputs, compare
from moetune.app.views.model_words import binding_words
from moetune.app.views.words import plan_scope, suspect_words
from moetune.app.whatif import WhatIfAnswer
from moetune.domain.any_plan import AnyPlan
from moetune.domain.request import constraint_words
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.section import EMPTY, Cell, Section, Table, percent, plural, sentence

_OF_A_RANK = "memory.parts.", "memory.activations."
_SMALL, _LARGE = 0.01, 100
_TIMES = ("predicted.parts.", "predicted.mean_parts.")
_SHARES = ("probability_best", "expected_regret", ".mfu", "_ratio")
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
    first: AnyPlan, second: AnyPlan, *, names: tuple[str, str]
) -> tuple[Section, ...]:
    """Return how the second plan differs from the first: in words, and field by field."""
    doubts = (words for plan in (first, second) for words in suspect_words(plan))
    words = Section(
        name="answer",
        doubts=tuple(dict.fromkeys(doubts)),
        paragraphs=tuple(_words(first, second, names)),
    )
    return words, _differing_fields(first, second, names)


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
    if changed := ", ".join(changed_inputs(first, second)):
        yield f"{names[1]} has {changed}."
    yield from compare(first, second)


def whatif_sections(answer: WhatIfAnswer) -> tuple[Section, ...]:
    """Return the changes, their effects on the plan, and the reason."""
    changes, *effects = answer.words
    after = answer.after
    reason = binding_words(after.best) if after.kind == "training" else after.decision.why
    section = Section(
        name="answer",
        title=changes,
        doubts=suspect_words(after, answer.before.inputs.profile),
        paragraphs=(*effects, sentence(reason)),
    )
    return (section,)


def _differing_fields(first: AnyPlan, second: AnyPlan, names: tuple[str, str]) -> Section:
    left, right = (dict(_flat("", plan.fields)) for plan in (first, second))
    if any(left.get(key) != right.get(key) for key in ("layout.pp", "memory.rank")):
        left, right = (  # parts are those of another pipeline rank
            {key: value for key, value in fields.items() if not key.startswith(_OF_A_RANK)}
            for fields in (left, right)
        )
    rows = [(key, left.get(key), right.get(key)) for key in dict.fromkeys((*left, *right))]
    return _differences([row for row in rows if row[1] != row[2]], names)


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


def _differences(rows: Sequence[tuple[str, object, object]], names: tuple[str, str]) -> Section:
    """Return each key with two values and their ratio; the key's ending says the unit."""
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
            for key, first, second in rows
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
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(first: object, second: object) -> Cell:
    if not isinstance(first, int | float) or not isinstance(second, int | float) or not first:
        return EMPTY
    ratio = second / first
    text = f"{ratio:,.{2 if ratio < _LARGE else 0}f} ×"
    return Cell(text=f"under {_SMALL} ×" if 0 < ratio < _SMALL else text, value=ratio, unit="1")
