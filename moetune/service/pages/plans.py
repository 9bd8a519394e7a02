"""The plans, and one of them."""

from moetune.domain.records import PlanInfo
from moetune.domain.units import DTYPE_BYTES
from moetune.report import tables
from moetune.report.observed import drift_picture, seen
from moetune.report.tables import Table
from moetune.service.pages.library import Library
from moetune.service.pages.sheet import Sheet, address
from moetune.service.pages.shell import age_now

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
