"""Pages of plans: the list, one plan, and two plans or profiles side by side."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.model import MODELS
from moetune.domain.records import PlanInfo
from moetune.domain.training_document import TrainingDocument
from moetune.report.observed import drift_figure, seen
from moetune.report.section import Section, Table
from moetune.service.pages.library import Library
from moetune.service.pages.page import Page, address, age_now, seconds_since
from moetune.service.pages.whatif import form_context
from moetune.workflows.library import PlanFilter, StoredPlan, list_plans, read_plans
from moetune.workflows.models import known_name, whole_names
from moetune.workflows.training import usable_bytes
from moetune.workflows.views.comparison import comparison_sections, machine_sections
from moetune.workflows.views.explanation import reasons
from moetune.workflows.views.plan import page_sections
from moetune.workflows.views.stored_plans import Links, stored_plans_table
from moetune.workflows.views.training_page import training_page
from moetune.workflows.views.words import (
    KIND_WORDS,
    kind_of,
)

PAGE_SIZE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFilter:
    """The list's filter as its form has it; "" for every one.

    Args:
        kind: a key of `KIND_WORDS`.

    Raises:
        InputError: there is no such kind.
    """

    model: str = ""
    profile: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KIND_WORDS:
            raise InputError(f"kind must be {', '.join(KIND_WORDS)} or empty, got {self.kind!r}")

    @property
    def query(self) -> dict[str, str]:
        """The fields of an address."""
        return {"model": self.model, "profile": self.profile, "kind": self.kind}


def plans_page(library: Library, *, wanted: ListFilter, after: str) -> Page:
    """Return a page of the plans that are wanted, newest first; of an empty store the first steps.

    Raises:
        NotFoundError: there is no plan `after`.
    """
    if library.is_empty:
        return Page(template="empty.html", title="Nothing measured yet", here="plans")
    seen_infos = _infos(library, wanted, after)
    found = read_plans(library.store, seen_infos)
    shown = [one for one in found if wanted.kind in {"", one.plan and kind_of(one.plan)}]
    older = seen_infos[-1].id if len(seen_infos) == PAGE_SIZE else ""
    return Page(
        template="plans.html",
        title="Plans",
        here="plans",
        sections=(Section(name="plans", tables=(_table(shown, is_last=not older),)),),
        context={
            "wanted": wanted,
            "kinds": KIND_WORDS,
            "models": (*MODELS, *whole_names()),
            "profiles": library.profile_names(),
            "newer": address("", **wanted.query) if after else "",
            "older": address("", after=older, **wanted.query) if older else "",
        },
    )


def _infos(library: Library, wanted: ListFilter, after: str) -> tuple[PlanInfo, ...]:
    """Return a page of list entries; kinds stand in the documents, and are not looked at."""
    if not wanted.model and not wanted.profile:
        return library.store.plan_page(after=after, limit=PAGE_SIZE)
    chosen = PlanFilter(model=wanted.model or None, profile=wanted.profile or None)
    found = list_plans(library.store, chosen)
    ids = [one.id for one in found]
    if after and after not in ids:
        raise NotFoundError(
            f"there is no plan {after[:12]!r} to go on after", "begin with the first page"
        )
    start = ids.index(after) + 1 if after else 0
    return found[start : start + PAGE_SIZE]


def plan_page(library: Library, plan_id: str) -> Page:
    """Return the page of one plan.

    Raises:
        NotFoundError: there is none.
    """
    wanted = library.any_plan(plan_id)
    if isinstance(wanted, TrainingDocument):
        return _training_page(library, wanted)
    explanation = library.planner.explain_plan(wanted)
    plan = explanation.plan
    found = seen(library.store.observation_page(plan.id, limit=500))
    figures = (drift_figure(found),) if found else ()
    observed = Section(name="observed", title="Observed steps", figures=figures)
    answer, *rest = page_sections(explanation)
    return Page(
        template="plan.html",
        title=f"{answer.title}, plan {plan.id[:6]}",
        here="plans",
        sections=(
            answer,
            *rest,
            *reasons(explanation, is_drawn=True),
            *((observed,) if found else ()),
        ),
        csv=lambda figure: f"/plans/{plan.id}/{figure.name}.csv",
        context={
            **form_context(plan, {}),
            "plan": plan,
            "profile_address": address("profiles", plan.inputs.profile),
            "model_address": address("models", plan.inputs.model) if plan.inputs.model else "",
            "observed_address": address("observed", plan=plan.id),
            "compare_address": address("compare", what="plans", first=plan.id),
            "document": f"/v1/plans/{plan.id}",
            "trace": f"/v1/plans/{plan.id}/trace",
        },
    )


def _training_page(library: Library, plan: TrainingDocument) -> Page:
    sections, inputs = training_page(plan), plan.inputs
    known = known_name(inputs.model)
    # A pasted configuration has no path: the page says to save it under the model's name.
    model = "" if known or inputs.model_path else f" --model {inputs.model}/config.json"
    can_trace = known and library.planner.profile_if_known(plan) is not None
    return Page(
        template="training.html",
        title=f"{sections[0].title}, plan {plan.id[:6]}",
        here="plans",
        sections=sections,
        csv=lambda figure: f"/plans/{plan.id}/{figure.name}.csv",
        context={
            "plan": plan,
            "profile_address": address("profiles", inputs.profile),
            "compare_address": address("compare", what="plans", first=plan.id),
            "document": f"/v1/plans/{plan.id}",
            "trace": f"/v1/plans/{plan.id}/trace" if can_trace else "",
            "model_address": address("models", known) if known else "",
            "new_address": _asked_anew(library, plan, known) if known else "",
            "commands": {
                f"Give it to {inputs.target}": (
                    f"moetune export {plan.id[:12]} --to {inputs.target}{model}"
                ),
                "Ask why, and why not another layout": f"moetune explain {plan.id[:12]}{model}",
                "See what the step depends on": f"moetune sensitivity {plan.id[:12]}{model}",
            },
        },
    )


def _asked_anew(library: Library, plan: TrainingDocument, model: str) -> str:
    """Return the address of New plan with the plan's inputs, without its pins."""
    inputs = plan.inputs
    limit = f"{inputs.memory_limit_bytes}B"
    with suppress(NotFoundError):  # of a profile that is there its own limit goes without saying
        machine = library.profile(inputs.profile).profile.machine
        limit = "" if usable_bytes(machine) == inputs.memory_limit_bytes else limit
    return address(
        "new", kind="model", decoder=model, profile=inputs.profile, target=inputs.target,
        world_size=str(inputs.world_size), global_batch=str(inputs.global_batch),
        seq=str(inputs.seq), training_dtype=inputs.dtype, memory_limit=limit,
    )  # fmt: skip


def compare_page(library: Library, *, what: str, first: str, second: str) -> Page:
    """Return the form, and with two names the comparison.

    Args:
        what: "plans" or "profiles".
        first, second: plans' ids or their beginnings, or profiles' names.

    Raises:
        InputError: `what` is something else.
        NotFoundError: one of the two does not exist.
    """
    if what not in {"plans", "profiles"}:
        raise InputError(f"what must be plans or profiles, got {what!r}")
    names: tuple[str, str] = (first, second)
    sections: tuple[Section, ...] = ()
    if first and second:
        compare = _plans if what == "plans" else _profiles
        names, sections = compare(library, first, second)
    return Page(
        template="compare.html",
        title="Compare",
        here="compare",
        sections=sections,
        csv=lambda figure: address(
            "compare", f"{figure.name}.csv", what=what, first=first, second=second
        ),
        context={
            "what": what,
            "first": _short(first) if what == "plans" else first,
            "second": _short(second) if what == "plans" else second,
            "names": names,
            "links": [address(what, first), address(what, second)],
            "plans": library.plan_choices(),
            "profiles": library.profile_names(),
        },
    )


def _short(plan_id: str) -> str:
    """Return as much of an id as a field shows."""
    return plan_id[:12]


_Comparison = tuple[tuple[str, str], tuple[Section, ...]]


def _plans(library: Library, first: str, second: str) -> _Comparison:
    left, right = library.any_plan(first), library.any_plan(second)
    names = left.id[:6], right.id[:6]
    return names, comparison_sections(left, right, names=names)


def _profiles(library: Library, first: str, second: str) -> _Comparison:
    left, right = (library.profile(name).profile for name in (first, second))
    names = left.name, right.name
    return names, machine_sections(left, right, names=names, is_drawn=True)


def _table(found: Sequence[StoredPlan], *, is_last: bool) -> Table:
    none = "No plan matches." if is_last else "No plan on this page matches: see older ones."
    return stored_plans_table([(one, _links(one.info)) for one in found], empty=none)


def _links(one: PlanInfo) -> Links:
    return Links(
        plan=address("plans", one.id),
        profile=address("profiles", one.profile),
        age=age_now(one.created_at),
        age_seconds=seconds_since(one.created_at),
    )
