"""Pages that compare: two plans, and a plan before and after a change."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request

from moetune.app.planner import ServicePlanner
from moetune.app.views.comparison import comparison_sections, whatif_sections
from moetune.app.views.words import plan_scope
from moetune.app.whatif import WhatIf, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.spelling import Spelling
from moetune.domain.training import TRAINING_DTYPES
from moetune.domain.units import DTYPE_BYTES, format_bytes, parse_bytes, parse_count
from moetune.report.section import Section
from moetune.service.pages.library import plan_field
from moetune.service.pages.page import Field, Form, Link, Page, Text, address, filled_fields
from moetune.service.problems import Problem, problem_of


def compare_page(planner: ServicePlanner, *, first: Text = "", second: Text = "") -> Page:
    """Return the form, and with two plans how the second one differs.

    Args:
        first, second: plans' ids or their beginnings.

    Raises:
        NotFoundError: one of the two does not exist.
    """
    sections: tuple[Section, ...] = ()
    links: tuple[Link, ...] = ()
    if first and second:
        plans = planner.sources.plan(first), planner.sources.plan(second)
        names = plans[0].id[:6], plans[1].id[:6]
        sections = comparison_sections(*plans, names=names, is_drawn=True)
        links = tuple(Link(name=plan.id[:6], href=address("plans", plan.id)) for plan in plans)
    form = Form(
        action="/compare",
        button="Compare",
        fields=tuple(
            plan_field(planner, name, f"{name.capitalize()} plan") for name in ("first", "second")
        ),
        values={"first": first[:12], "second": second[:12]},
    )  # fmt: skip
    return Page(
        title="Compare two plans", here="compare", links=links, forms=(form,), sections=sections
    )


def _flags(text: str) -> dict[str, str | None]:
    """Return flags of `moetune plan` and their values; None for one that is removed."""
    flags: dict[str, str | None] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.removeprefix("--").partition("=")
        if not name or not equals:
            raise InputError(f"{word!r} is not FLAG=VALUE", "such as tp=2 seq=8k")
        flags[name] = value or None
    return flags


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number", "2 is twice as fast") from None


class _Change(NamedTuple):
    label: str
    hint: str
    read: Callable[[str], object]


SPEEDS = ("computation", "communication", "copies")
CHANGES: Mapping[str, _Change] = MappingProxyType(
    {
        "tokens_per_rank": _Change("Tokens per rank", "such as 32k", parse_count),
        "world_size": _Change("Ranks", "that share the experts", parse_count),
        "memory_limit_bytes": _Change(
            "Memory limit", "of one device, such as 40GiB", parse_bytes
        ),
        "dtype": _Change("Element type", "that the profile has measured", str),
        "flags": _Change("Flags", "of moetune plan, as FLAG=VALUE; FLAG= removes one", _flags),
        "computation": _Change("Speed of computation", "2 is twice as fast", _speed),
        "communication": _Change("Speed of communication", "0.5 is half as fast", _speed),
        "copies": _Change("Speed of copies", "between device and host", _speed),
    }
)  # fmt: skip
"""Every field of the what-if form by its name in an address."""
_AS_LABELS = Spelling(
    key="{}", constraint="{}", names={name: change.label for name, change in CHANGES.items()}
)


def question(fields: Mapping[str, str]) -> WhatIf:
    """Return the question in a form's fields that are filled in.

    Raises:
        InputError: a field is not a number, or not one with its unit; the message names it.
    """
    changes: dict[str, Any] = {}
    for name, text in fields.items():
        try:
            changes["constraints" if name == "flags" else name] = CHANGES[name].read(text)
        except InputError as error:
            raise InputError(f"{CHANGES[name].label}: {error.what}", error.hint) from None
    speeds = {name: changes.pop(name) for name in SPEEDS if name in changes}
    return WhatIf(changes=changes, speeds=speeds, spelling=_AS_LABELS)


def whatif_form(
    plan: AnyPlan, values: Mapping[str, str] = MappingProxyType({}), *, title: str
) -> Form:
    """Return the form, with a plan's inputs as what its empty fields stand for."""
    is_training, inputs = plan.kind == "training", plan.inputs
    limit = inputs.memory_limit_bytes
    empty = {
        "world_size": f"{inputs.world_size:,}",
        "memory_limit_bytes": format_bytes(limit) if limit else "all of it",
        "dtype": f"{inputs.dtype}, as now",
        "flags": "tp=2 seq=8k" if is_training else "strategy=S4",
        **dict.fromkeys(SPEEDS, "1"),
    }
    if plan.kind != "training":
        empty["tokens_per_rank"] = f"{plan.inputs.tokens_per_rank:,}"
    dtypes = TRAINING_DTYPES if is_training else tuple(DTYPE_BYTES)
    fields = tuple(
        Field(
            name=name, label=change.label, hint=change.hint, placeholder=empty[name],
            choices=dtypes if name == "dtype" else (),
        )
        for name, change in CHANGES.items()
        if name in empty
    )  # fmt: skip
    return Form(
        action="/whatif", button="Plan again", fields=fields, values=values,
        hidden={"plan": plan.id}, title=title,
        words="Fill in only the changes. Nothing is stored." if title else "",
    )  # fmt: skip


def whatif_page(planner: ServicePlanner, request: Request, *, plan: Text = "") -> Page:
    """Return the form, and for a filled one the plan before and after the change.

    Errors in the fields are shown above the form, which stays filled in.

    Raises:
        NotFoundError: there is no such plan.
    """
    if not plan:
        return Page(
            title="What if",
            here="whatif",
            intro="Change a plan's inputs or the speed of its machine, and see the new plan. "
            "Nothing is stored.",
            forms=(
                Form(
                    action="/whatif", button="Choose", fields=(plan_field(planner, "plan", "Plan"),)
                ),
            ),
        )
    before, fields = planner.sources.plan(plan), filled_fields(request, CHANGES)
    sections, problem = _answer(planner, before, fields)
    title = "Change something else" if sections else ""
    return Page(
        title="What if",
        here="whatif",
        intro=f"{before.name} · {plan_scope(before)}",
        links=(Link(name=f"Plan {before.id[:12]}", href=address("plans", before.id)),),
        problem=problem,
        forms=(whatif_form(before, fields, title=title),),
        sections=sections,
    )


def _answer(
    planner: ServicePlanner, plan: AnyPlan, fields: Mapping[str, str]
) -> tuple[tuple[Section, ...], Problem | None]:
    """Return the answer's sections, or why there is none."""
    if not fields:
        return (), None
    try:
        answer = whatif(planner, plan, question(fields))
        return whatif_sections(answer, is_drawn=True), None
    except MoetuneError as error:
        return (), problem_of(error)
