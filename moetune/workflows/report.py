"""`moetune report`: what is known, planned and observed, as one HTML file with everything in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from moetune.domain.errors import ProfileError
from moetune.domain.plan import Plan
from moetune.domain.ports import Store
from moetune.report.fits import fit_picture
from moetune.report.html import report_page
from moetune.report.observed import drift_picture, observed_picture, seen
from moetune.report.operations import OperationCurve, interference_picture
from moetune.report.section import Picture, Table
from moetune.workflows.files import find_plan, write_text
from moetune.workflows.plan_view import PlanView, view_plan
from moetune.workflows.planner import Planner
from moetune.workflows.profile_view import ProfileView, operations_table, view_profile
from moetune.workflows.profiles import FoundProfile, find_profile
from moetune.workflows.sources import LocalSources
from moetune.workflows.wiring import StoreFinder

NUM_PLANS = 5
"""Newest plans of a report that names none."""
MOST_OBSERVATIONS = 10_000
_MOST_OF_A_KIND = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPlan:
    """A plan in a report."""

    view: PlanView
    observed: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProfile:
    """A profile in a report, with the operations that are drawn."""

    view: ProfileView
    operations: Table
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was written."""

    file: Path
    profiles: tuple[str, ...]
    plans: tuple[str, ...]
    num_figures: int


def write_report(
    output: Path,
    *,
    profile: str | None,
    plans: Sequence[str],
    stores: StoreFinder,
    now: datetime,
    version: str,
) -> Report:
    """Write the report, whole or not at all.

    Args:
        profile: as in `find_profile`; None for the newest measured, else the first plan's own.
        plans: as in `find_plan`; none for the newest ones of the store.
        version: of moetune.

    Raises:
        MoetuneError: what is named is missing or broken, there is nothing to report, or what
            draws is not installed.
    """
    found = [find_plan(one, stores=stores) for one in plans] or _newest_plans(stores)
    machine = _profile(profile, found, stores)
    if machine is None and not found:
        raise ProfileError(
            "there is nothing to report yet: no profile and no plan",
            "measure this machine:  moetune profile --nproc 2\n"
            "  or plan for a known one:  moetune plan --model gpt-xl --profile rtx2080ti-x64 "
            "--dtype float16",
        )
    shown = [_reported_profile(machine)] if machine else []
    planned = [_reported_plan(one, stores) for one in found]
    pictures = [*(one.pictures for one in shown), *(one.view.pictures for one in planned)]
    pictures += [one.observed for one in planned]
    name = machine.profile.name if machine else found[0].inputs.profile
    text = report_page(
        title=f"moetune report: {name}",
        made_at=f"{now:%Y-%m-%d %H:%M} UTC",
        version=version,
        views={"profiles": shown, "plans": planned},
    )
    write_text(output, text)
    return Report(
        file=output,
        profiles=(machine.profile.name,) if machine else (),
        plans=tuple(one.id for one in found),
        num_figures=sum(map(len, pictures)),
    )


def observed_pictures(plan: Plan, store: Store | None) -> tuple[Picture, ...]:
    """Return the plan's observations over time, nothing where there are none."""
    if store is None:
        return ()
    found = seen(store.observation_page(plan.id, limit=MOST_OBSERVATIONS))
    return (observed_picture(found), drift_picture(found)) if found else ()


def _newest_plans(stores: StoreFinder) -> list[Plan]:
    with stores() as store:
        if store is None:
            return []
        found = [store.plan(one.id) for one in store.plan_page(limit=NUM_PLANS)]
    return [one for one in found if one is not None]


def _profile(wanted: str | None, plans: Sequence[Plan], stores: StoreFinder) -> FoundProfile | None:
    if wanted is not None:
        return find_profile(wanted, stores=stores)
    for name in (None, *(plan.inputs.profile for plan in plans[:1])):
        try:
            return find_profile(name, stores=stores)
        except ProfileError:
            continue
    return None


def _reported_plan(plan: Plan, stores: StoreFinder) -> ReportedPlan:
    planner = Planner(sources=LocalSources(stores=stores))
    view = view_plan(planner.explain_plan(plan))
    with stores() as store:
        return ReportedPlan(view=view, observed=observed_pictures(plan, store))


def _reported_profile(found: FoundProfile) -> ReportedProfile:
    view = view_profile(found)
    fits = (replace(fit_picture(one), name=f"fit-{one.key}") for one in _drawn(view.operations))
    return ReportedProfile(
        view=view,
        operations=operations_table(view),
        pictures=(*fits, interference_picture(found.profile.interference)),
    )


def _drawn(operations: Sequence[OperationCurve]) -> Iterator[OperationCurve]:
    """Yield some of each kind: a full profile has a hundred shapes of the same product."""
    for kind in dict.fromkeys(one.kind for one in operations):
        yield from islice((one for one in operations if one.kind == kind), _MOST_OF_A_KIND)
