"""The what-if page: a form, and the plan before and after the change."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fastapi import Request

from moetune.app.views.comparison import whatif_sections
from moetune.app.views.words import plan_scope
from moetune.app.whatif import WhatIf, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.spelling import Spelling
from moetune.domain.training import TRAINING_DTYPES
from moetune.domain.units import DTYPE_BYTES, format_bytes, parse_bytes, parse_count
from moetune.report.section import Section
from moetune.service.pages.library import Library
from moetune.service.pages.page import Field, Page, Text, address, filled
from moetune.service.problems import problem_of

SPEEDS = ("computation", "communication", "copies")
LABELS = MappingProxyType(
    {
        "tokens_per_rank": "Tokens per rank", "world_size": "Ranks",
        "memory_limit_bytes": "Memory limit", "dtype": "Element type", "flags": "Flags",
        **{name: f"Speed of {name}" for name in SPEEDS},
    }
)  # fmt: skip
"""Every field by its name in an address, as the page and its errors call it."""
_AS_LABELS = Spelling(key="{}", constraint="{}", names=LABELS)


def _flags(text: str) -> dict[str, str | None]:
    """Return flags of `moetune plan` and their values; None for one that is removed."""
    found: dict[str, str | None] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not name or not equals:
            raise InputError(f"{word!r} is not FLAG=VALUE", "such as tp=2 seq=8k")
        found[name] = value or None
    return found


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number", "2 is twice as fast") from None


_READERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        "tokens_per_rank": parse_count, "world_size": parse_count,
        "memory_limit_bytes": parse_bytes, "dtype": str, "flags": _flags,
        **dict.fromkeys(SPEEDS, _speed),
    }
)  # fmt: skip


def question(plan: AnyPlan, fields: Mapping[str, str]) -> WhatIf:
    """Return the question in a form's fields that are filled in.

    Raises:
        InputError: a field is not a number, or not one with its unit; the message names it.
    """
    found: dict[str, Any] = {}
    for name, text in fields.items():
        try:
            found["constraints" if name == "flags" else name] = _READERS[name](text)
        except InputError as error:
            raise InputError(f"{LABELS[name]}: {error.what}", error.hint) from None
    speeds = {name: found.pop(name) for name in SPEEDS if name in found}
    return WhatIf(plan_id=plan.id, changes=found, speeds=speeds, spelling=_AS_LABELS)


def whatif_fields(plan: AnyPlan | None) -> tuple[Field, ...]:
    """Return the form's fields, with a plan's inputs as what their empty ones stand for."""
    is_training = plan is not None and plan.kind == "training"
    tokens, ranks, memory, dtype = "8k", "64", "all of it", "as planned"
    if plan is not None:
        ranks, dtype = f"{plan.inputs.world_size:,}", f"{plan.inputs.dtype}, as now"
        if limit := plan.inputs.memory_limit_bytes:
            memory = format_bytes(limit)
    if plan is not None and not is_training:
        tokens = f"{plan.inputs.tokens_per_rank:,}"
    example = "tp=2 seq=8k" if is_training else "strategy=S4"
    of_layers = () if is_training else (_field("tokens_per_rank", "such as 32k", tokens),)
    dtypes = TRAINING_DTYPES if is_training else tuple(DTYPE_BYTES)
    return (
        *of_layers,
        _field("world_size", "that share the experts", ranks),
        _field("memory_limit_bytes", "of one device, such as 40GiB", memory),
        replace(_field("dtype", "that the profile has measured", dtype), choices=dtypes),
        _field("flags", "of moetune plan, as FLAG=VALUE; FLAG= removes one", example),
        _field("computation", "2 is twice as fast", "1"),
        _field("communication", "0.5 is half as fast", "1"),
        _field("copies", "between device and host", "1"),
    )


def _field(name: str, hint: str, placeholder: str) -> Field:
    return Field(name=name, label=LABELS[name], hint=hint, placeholder=placeholder)


def whatif_page(library: Library, request: Request, *, plan: Text = "") -> Page:
    """Return the form, and for a filled one the plan before and after the change.

    Errors in the fields are shown above the form, which stays filled in.

    Raises:
        NotFoundError: there is no such plan.
    """
    found, fields = library.any_plan(plan) if plan else None, filled(request, LABELS)
    sections, problem = _ask(library, found, fields)
    return Page(
        template="whatif.html",
        title="What if",
        here="whatif",
        sections=sections,
        csv=lambda figure: address("whatif", f"{figure.name}.csv", plan=plan, **fields),
        context={
            "fields_of": whatif_fields(found),
            "values": fields,
            "plan": found,
            "name": found.name if found else "",
            "scope": plan_scope(found) if found else "",
            "choice": (library.plan_field("plan", "Plan"),),
            "problem": problem,
        },
        status=int(problem_of(problem).status) if problem else 200,
    )


def _ask(
    library: Library, plan: AnyPlan | None, fields: Mapping[str, str]
) -> tuple[tuple[Section, ...], MoetuneError | None]:
    """Return the answer's sections, or why there is none."""
    if plan is None or not fields:
        return (), None
    try:
        answer = whatif(library.planner, question(plan, fields), plan)
        return whatif_sections(answer, is_drawn=True), None
    except MoetuneError as error:
        return (), error
