"""`moetune report`: a profile, plans and observed steps in a self-contained HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moetune.app.files import find_plan, write_text
from moetune.app.planner import Planner
from moetune.app.profiles import ResolvedProfile, find_profile
from moetune.app.sources import Sources
from moetune.app.views.observed import observed_sections
from moetune.app.views.plan import plan_sections
from moetune.app.views.profile import machine_scope, profile_sections
from moetune.app.wiring import StoreFinder
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import ProfileError
from moetune.report.html import Chapter, report_page

NUM_PLANS = 5
"""Newest plans that a report shows if no plan is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The written file and its contents: names of profiles, ids of plans."""

    file: Path
    profiles: tuple[str, ...]
    plans: tuple[str, ...]


def write_report(
    output: Path,
    *,
    profile: str | None,
    default: str | None = None,
    plans: Sequence[str],
    stores: StoreFinder,
) -> Report:
    """Write the report atomically.

    Args:
        profile: as in `find_profile`; None for the first plan's profile.
        default: the profile if there is no plan; None for the newest measured profile.
        plans: each as in `find_plan`; empty for the store's newest plans.

    Raises:
        MoetuneError: a named plan or profile is missing or broken, there is nothing to report, or
            Jinja2 is not installed.
    """
    shown = [find_plan(wanted, stores=stores) for wanted in plans] or _newest_plans(stores)
    machine = _profile(profile, default, shown, stores)
    if machine is None and not shown:
        raise ProfileError(
            "there is nothing to report yet: no profile and no plan",
            "measure this machine:  moetune profile --nproc 2\n"
            "  or plan for a reference machine:  "
            "moetune plan --model gpt-xl --profile rtx2080ti-x64 --dtype float16",
        )
    chapters = [_plan_chapter(plan, stores) for plan in shown]
    chapters += [_profile_chapter(machine)] if machine else []
    name = machine.profile.name if machine else shown[0].inputs.profile
    write_text(output, report_page(title=f"moetune report: {name}", chapters=chapters))
    return Report(
        file=output,
        profiles=(machine.profile.name,) if machine else (),
        plans=tuple(plan.id for plan in shown),
    )


def _newest_plans(stores: StoreFinder) -> list[AnyPlan]:
    with stores() as store:
        if store is None:
            return []
        ids = [info.id for info in store.plans(limit=NUM_PLANS)]
        plans = [store.plan(plan_id) for plan_id in ids]
    return [plan for plan in plans if plan is not None]


def _profile(
    wanted: str | None, default: str | None, plans: Sequence[AnyPlan], stores: StoreFinder
) -> ResolvedProfile | None:
    if wanted is not None:
        return find_profile(wanted, stores=stores)
    try:
        return find_profile(plans[0].inputs.profile if plans else default, stores=stores)
    except ProfileError:
        return None


def _plan_chapter(plan: AnyPlan, stores: StoreFinder) -> Chapter:
    planner = Planner(sources=Sources(stores=stores))
    sections = plan_sections(planner.explain(plan), is_page=True)
    with stores() as store:
        observed = observed_sections(store, plan) if store else ()
    return Chapter(
        name=f"plan-{plan.id[:12]}",
        short=f"Plan {plan.id[:6]}",
        title=f"Plan {plan.id[:6]}: {sections[0].title}",
        scope=f"{sections[0].scope} · profile {plan.inputs.profile}",
        sections=(*sections, *observed),
    )


def _profile_chapter(machine: ResolvedProfile) -> Chapter:
    name = machine.profile.name
    return Chapter(
        name="profile",
        short=name,
        title=f"Profile {name}",
        scope=machine_scope(machine.profile),
        sections=profile_sections(machine),
    )
