"""The what-if page: a form, and the plan before and after the change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.spelling import Spelling
from moetune.domain.units import DTYPE_BYTES, parse_bytes, parse_count
from moetune.service.pages.library import Library
from moetune.service.pages.page import Page, address
from moetune.service.problems import problem_of
from moetune.workflows.views.comparison import whatif_sections
from moetune.workflows.views.words import (
    plan_name,
    plan_scope,
)
from moetune.workflows.whatif import WhatIf, WhatIfAnswer

SPEEDS = ("computation", "communication", "copies")
LABELS = MappingProxyType(
    {
        "tokens_per_rank": "Tokens per rank", "world_size": "Ranks",
        "memory_limit_bytes": "Memory limit", "dtype": "Element type",
        **{name: f"Speed of {name}" for name in SPEEDS},
    }
)  # fmt: skip
"""Every field by its name in an address, as the page and its errors call it."""
FIELDS = tuple(LABELS)
_AS_LABELS = Spelling(key="{}", constraint="{}", names=LABELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfForm:
    """The form's fields as text; "" for inputs that do not change."""

    plan: str
    fields: Mapping[str, str]

    @property
    def is_filled(self) -> bool:
        """Whether there is a plan and a change."""
        return bool(self.plan) and any(self.fields.values())

    def question(self, plan: Plan) -> WhatIf:
        """Return the question in the form.

        Raises:
            InputError: a field is not a number, or not one with its unit; the message names it.
        """
        return WhatIf(
            plan_id=plan.id,
            changes=dict(self._changes()),
            speeds=dict(self._speeds()),
            spelling=_AS_LABELS,
        )

    def _changes(self) -> Mapping[str, object]:
        readers: Mapping[str, Callable[[str], object]] = {
            "tokens_per_rank": parse_count, "world_size": parse_count,
            "memory_limit_bytes": parse_bytes, "dtype": str,
        }  # fmt: skip
        found: dict[str, object] = {}
        for name, read in readers.items():
            if text := self.fields.get(name, ""):
                try:
                    found[name] = read(text)
                except InputError as error:
                    raise InputError(f"{LABELS[name]}: {error.what}", error.hint) from None
        return found

    def _speeds(self) -> Mapping[str, float]:
        found = {}
        for name in SPEEDS:
            if text := self.fields.get(name, ""):
                try:
                    found[name] = float(text)
                except ValueError:
                    raise InputError(
                        f"{LABELS[name]} must be a number, got {text!r}", "2 is twice as fast"
                    ) from None
        return found


def form_context(plan: Plan | None, fields: Mapping[str, str]) -> dict[str, object]:
    """Return the template's variables of the form: the fields, and the plan's inputs as hints."""
    return {
        "form": {"plan": plan.id if plan else "", **fields},
        "inputs": plan.inputs if plan else None,
        "dtypes": tuple(DTYPE_BYTES),
        "labels": LABELS,
    }


def whatif_page(library: Library, form: WhatIfForm) -> Page:
    """Return the form, and for a filled one the plan before and after the change.

    Errors in the fields are shown above the form, which stays filled in.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = library.planner.plan(form.plan) if form.plan else None
    answer, problem = _ask(library, form, plan)
    return Page(
        template="whatif.html",
        title="What if",
        here="whatif",
        sections=whatif_sections(answer, is_drawn=True) if answer else (),
        csv=lambda figure: address("whatif", f"{figure.name}.csv", plan=form.plan, **form.fields),
        context={
            **form_context(plan, form.fields),
            "plan": plan,
            "name": plan_name(plan) if plan else "",
            "scope": plan_scope(plan) if plan else "",
            "plans": library.plan_choices(),
            "problem": problem,
        },
        status=int(problem_of(problem).status) if problem else 200,
    )


def _ask(
    library: Library, form: WhatIfForm, plan: Plan | None
) -> tuple[WhatIfAnswer | None, MoetuneError | None]:
    if plan is None or not form.is_filled:
        return None, None
    try:
        return library.planner.whatif(form.question(plan)), None
    except MoetuneError as error:
        return None, error
