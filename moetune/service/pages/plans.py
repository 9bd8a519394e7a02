"""Two plans or two profiles beside each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.records import PlanInfo
from moetune.domain.spelling import AS_FIELDS
from moetune.domain.units import DTYPE_BYTES, parse_bytes, parse_count
from moetune.report import section as tables
from moetune.report.observed import drift_picture, seen
from moetune.report.plan_figures import degree_picture, phases_picture
from moetune.report.section import Picture, Table
from moetune.service.pages.library import Library
from moetune.service.pages.sheet import Sheet, address
from moetune.service.pages.shell import age_now
from moetune.service.problems import problem_of
from moetune.workflows.explain import explain_plan
from moetune.workflows.figures import time_pictures
from moetune.workflows.plan_view import plan_answer, plan_name, plan_scope
from moetune.workflows.profile_view import compare_machines, compare_plans, overlays
from moetune.workflows.whatif import WhatIf, WhatIfAnswer

PAGE_SIZE = 50


def plans_sheet(library: Library, *, after: str) -> Sheet:
    """Return a page of the plans, newest first; what to do first where the store is empty.

    Raises:
        NotFoundError: there is no plan `after`.
    """
    if library.is_empty:
        return Sheet(
            template="empty.html", context={"title": "Nothing measured yet", "here": "plans"}
        )
    found = library.store.plan_page(after=after, limit=PAGE_SIZE)
    older = found[-1].id if len(found) == PAGE_SIZE else ""
    return Sheet(
        template="plans.html",
        context={
            "title": "Plans",
            "here": "plans",
            "plans": _table(found),
            "newer": bool(after),
            "older": address("", after=older) if older else "",
        },
    )


def plan_sheet(library: Library, plan_id: str) -> Sheet:
    """Return the page of one plan.

    Raises:
        NotFoundError: there is none.
    """
    view = library.view(plan_id)
    plan = view.plan
    found = seen(library.store.observation_page(plan.id, limit=500))
    observed = (drift_picture(found),) if found else ()
    return Sheet(
        template="plan.html",
        context={
            "title": f"{view.name}, plan {plan.id[:6]}",
            "here": "plans",
            "view": view,
            "observed": observed,
            "profile_address": address("profiles", plan.inputs.profile),
            "observed_address": address("observed", plan=plan.id),
            "compare_address": address("compare", what="plans", first=plan.id),
            "document": f"/v1/plans/{plan.id}",
            "trace": f"/v1/plans/{plan.id}/trace",
            "csv": lambda picture: f"/plans/{plan.id}/{picture.name}.csv",
            "form": {"plan": plan.id},
            "dtypes": tuple(DTYPE_BYTES),
            "asked": plan.inputs,
        },
        pictures=(*view.pictures, *observed),
    )


def plan_words(one: PlanInfo) -> str:
    """Return a plan in a list: "gpt-xl · 64 ranks · 8,192 tokens · rtx2080ti-x64"."""
    return (
        f"{one.model or 'layer'} · {one.world_size:,} ranks · {one.tokens_per_rank:,} tokens · "
        f"{one.profile}"
    )


def _table(found: tuple[PlanInfo, ...]) -> Table:
    return Table(
        name="plans",
        title="Newest first",
        header=("plan", "model", "profile", "ranks", "tokens per rank", "made"),
        rows=tuple(
            (
                tables.text(one.id[:12], href=address("plans", one.id), mark="code"),
                tables.text(one.model or "a layer"),
                tables.text(one.profile, href=address("profiles", one.profile)),
                tables.count(one.world_size),
                tables.count(one.tokens_per_rank),
                tables.Cell(text=age_now(one.created_at)),
            )
            for one in found
        ),
        right=tables.columns(3, 4),
        empty="No plan was made yet.",
    )


def compare_sheet(library: Library, *, what: str, first: str, second: str) -> Sheet:
    """Return the form, and with two names the comparison.

    Args:
        what: "plans" or "profiles".
        first, second: ids, or the beginning of one; or names.

    Raises:
        InputError: `what` is something else.
        NotFoundError: one of them is not there.
    """
    if what not in {"plans", "profiles"}:
        raise InputError(f"what must be plans or profiles, got {what!r}")
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    names = first, second
    if first and second:
        compare = _plans if what == "plans" else _profiles
        names, pictures, table = compare(library, first, second)
    return Sheet(
        template="compare.html",
        context={
            "title": "Compare",
            "here": "compare",
            "what": what,
            "first": first,
            "second": second,
            "names": names,
            "plans": {one.id[:12]: plan_words(one) for one in library.newest_plans()},
            "profiles": library.profile_names(),
            "pictures": pictures,
            "table": table,
            "links": [address(what, first), address(what, second)],
            "csv": lambda picture: address(
                "compare", f"{picture.name}.csv", what=what, first=first, second=second
            ),
        },
        pictures=pictures,
    )


_Comparison = tuple[tuple[str, str], tuple[Picture, ...], Table]


def _plans(library: Library, first: str, second: str) -> _Comparison:
    left, right = library.plan(first), library.plan(second)
    names = left.id[:6], right.id[:6]
    if left.id == right.id:
        return names, (), compare_plans(left, right, names=names)
    plans = {names[0]: left, names[1]: right}
    pictures = phases_picture(plans), degree_picture(plans)
    return names, pictures, compare_plans(left, right, names=names)


def _profiles(library: Library, first: str, second: str) -> _Comparison:
    left, right = (library.profile(name).profile for name in (first, second))
    return (left.name, right.name), overlays(left, right), compare_machines(left, right)


SPEEDS = ("computation", "communication", "copies")
NAMES = ("now", "changed")
FIELDS = ("tokens_per_rank", "world_size", "memory_limit_bytes", "dtype", *SPEEDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the reader filled in, as text; "" for what stays as it is."""

    plan: str
    fields: Mapping[str, str]

    @property
    def is_asked(self) -> bool:
        """Whether anything is changed."""
        return bool(self.plan) and any(self.fields.values())

    def question(self, plan: Plan) -> WhatIf:
        """Return the question.

        Raises:
            InputError: a field is no number of its kind; the text names it.
        """
        return WhatIf(
            plan_id=plan.id,
            changes=dict(self._changes()),
            speeds=dict(self._speeds()),
            spelling=AS_FIELDS,
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
                    raise InputError(f"{name}: {error.what}", error.hint) from None
        return found

    def _speeds(self) -> Mapping[str, float]:
        found = {}
        for name in SPEEDS:
            if text := self.fields.get(name, ""):
                try:
                    found[name] = float(text)
                except ValueError:
                    raise InputError(
                        f"{name} must be a number, got {text!r}", "2 is twice as fast"
                    ) from None
        return found


def whatif_sheet(library: Library, form: Form) -> Sheet:
    """Return the form, and where something is changed the plan before and after.

    What is wrong with the question is said beside the form, which keeps what was filled in.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = library.plan(form.plan) if form.plan else None
    answer, problem = _ask(library, form, plan)
    pictures = _pictures(answer) if answer else ()
    return Sheet(
        template="whatif.html",
        context={
            "title": "What if",
            "here": "whatif",
            "plan": plan,
            "name": plan_name(plan) if plan else "",
            "scope": plan_scope(plan) if plan else "",
            "form": {"plan": plan.id if plan else "", **form.fields},
            "asked": plan.inputs if plan else None,
            "dtypes": tuple(DTYPE_BYTES),
            "plans": {one.id[:12]: plan_words(one) for one in library.newest_plans()},
            "problem": problem,
            "answer": answer,
            "after": plan_answer(answer.after) if answer else "",
            "pictures": pictures,
            "table": compare_plans(answer.before, answer.after, names=NAMES) if answer else None,
            "csv": lambda picture: address(
                "whatif", f"{picture.name}.csv", plan=form.plan, **form.fields
            ),
        },
        pictures=pictures,
        status=int(problem_of(problem).status) if problem else 200,
    )


def _ask(
    library: Library, form: Form, plan: Plan | None
) -> tuple[WhatIfAnswer | None, MoetuneError | None]:
    if plan is None or not form.is_asked:
        return None, None
    try:
        return library.planner.whatif(form.question(plan)), None
    except MoetuneError as error:
        return None, error


def _pictures(answer: WhatIfAnswer) -> tuple[Picture, ...]:
    plans = dict(zip(NAMES, (answer.before, answer.after), strict=True))
    explained = explain_plan(answer.after, profile=answer.profile)
    changed = (replace(one, title=f"{one.title}, changed") for one in time_pictures(explained))
    return phases_picture(plans), degree_picture(plans), *changed
