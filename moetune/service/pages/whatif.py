"""The what-if page: a form, and the plan before and after the change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.spelling import Spelling
from moetune.domain.training import TRAINING_DTYPES
from moetune.domain.units import DTYPE_BYTES, format_bytes, parse_bytes, parse_count
from moetune.report.section import Section
from moetune.service.pages.fields import Field
from moetune.service.pages.library import Library
from moetune.service.pages.page import Page, address
from moetune.service.problems import problem_of
from moetune.workflows.changes import WhatIf
from moetune.workflows.views.comparison import whatif_sections
from moetune.workflows.views.words import plan_scope
from moetune.workflows.whatif import whatif

SPEEDS = ("computation", "communication", "copies")
LABELS = MappingProxyType(
    {
        "tokens_per_rank": "Tokens per rank", "world_size": "Ranks",
        "memory_limit_bytes": "Memory limit", "dtype": "Element type", "flags": "Flags",
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

    def question(self, plan: AnyPlan) -> WhatIf:
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
        if flags := self.fields.get("flags", ""):
            found["constraints"] = dict(map(_flag, flags.replace(",", " ").split()))
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


def _flag(text: str) -> tuple[str, str | None]:
    """Return a flag of `moetune plan` and its value; None for one that is removed."""
    name, equals, value = text.removeprefix("--").partition("=")
    if not name or not equals:
        raise InputError(f"Flags: {text!r} is not FLAG=VALUE", "such as tp=2 seq=8k")
    return name, value or None


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


def whatif_page(library: Library, form: WhatIfForm) -> Page:
    """Return the form, and for a filled one the plan before and after the change.

    Errors in the fields are shown above the form, which stays filled in.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = library.any_plan(form.plan) if form.plan else None
    sections, problem = _ask(library, form, plan)
    return Page(
        template="whatif.html",
        title="What if",
        here="whatif",
        sections=sections,
        csv=lambda figure: address("whatif", f"{figure.name}.csv", plan=form.plan, **form.fields),
        context={
            "fields_of": whatif_fields(plan),
            "values": form.fields,
            "plan": plan,
            "name": plan.name if plan else "",
            "scope": plan_scope(plan) if plan else "",
            "choice": (library.plan_field("plan", "Plan"),),
            "problem": problem,
        },
        status=int(problem_of(problem).status) if problem else 200,
    )


def _ask(
    library: Library, form: WhatIfForm, plan: AnyPlan | None
) -> tuple[tuple[Section, ...], MoetuneError | None]:
    """Return the answer's sections, or why there is none."""
    if plan is None or not form.is_filled:
        return (), None
    try:
        answer = whatif(library.planner, form.question(plan), plan)
        return whatif_sections(answer, is_drawn=True), None
    except MoetuneError as error:
        return (), error
