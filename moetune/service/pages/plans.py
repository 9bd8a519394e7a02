"""Pages of plans: the list, one plan, and two plans or profiles side by side."""

from moetune.domain.errors import InputError
from moetune.domain.records import PlanInfo
from moetune.report.observed import drift_figure, seen
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import Library, plan_words
from moetune.service.pages.page import Page, address, age_now
from moetune.service.pages.whatif import form_context
from moetune.workflows.views.comparison import comparison_sections, machine_sections
from moetune.workflows.views.explanation import reasons
from moetune.workflows.views.plan import page_sections

PAGE_SIZE = 50


def plans_page(library: Library, *, after: str) -> Page:
    """Return a page of the plans, newest first; for an empty store the first steps.

    Raises:
        NotFoundError: there is no plan `after`.
    """
    if library.is_empty:
        return Page(template="empty.html", title="Nothing measured yet", here="plans")
    found = library.store.plan_page(after=after, limit=PAGE_SIZE)
    older = found[-1].id if len(found) == PAGE_SIZE else ""
    return Page(
        template="plans.html",
        title="Plans",
        here="plans",
        sections=(Section(name="plans", tables=(_table(found),)),),
        context={
            "newer": "/" if after else "",
            "older": address("", after=older) if older else "",
        },
    )


def plan_page(library: Library, plan_id: str) -> Page:
    """Return the page of one plan.

    Raises:
        NotFoundError: there is none.
    """
    explanation = library.planner.explain(plan_id)
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
            "observed_address": address("observed", plan=plan.id),
            "compare_address": address("compare", what="plans", first=plan.id),
            "document": f"/v1/plans/{plan.id}",
            "trace": f"/v1/plans/{plan.id}/trace",
        },
    )


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
            "first": first,
            "second": second,
            "names": names,
            "links": [address(what, first), address(what, second)],
            "plans": {one.id[:12]: plan_words(one) for one in library.newest_plans()},
            "profiles": library.profile_names(),
        },
    )


_Comparison = tuple[tuple[str, str], tuple[Section, ...]]


def _plans(library: Library, first: str, second: str) -> _Comparison:
    left, right = library.plan(first), library.plan(second)
    names = left.id[:6], right.id[:6]
    return names, comparison_sections(left, right, names=names)


def _profiles(library: Library, first: str, second: str) -> _Comparison:
    left, right = (library.profile(name).profile for name in (first, second))
    names = left.name, right.name
    return names, machine_sections(left, right, names=names, is_drawn=True)


def _table(found: tuple[PlanInfo, ...]) -> Table:
    return Table(
        name="plans",
        title="Newest first",
        header=("plan", "model", "profile", "ranks", "tokens per rank", "made"),
        rows=tuple(
            (
                Cell(text=one.id[:12], value=one.id, href=address("plans", one.id), mark="code"),
                Cell.words(one.model or "a layer"),
                Cell.words(one.profile, href=address("profiles", one.profile)),
                Cell.count(one.world_size),
                Cell.count(one.tokens_per_rank),
                Cell.words(age_now(one.created_at)),
            )
            for one in found
        ),
        empty="No plan was made yet.",
    )
