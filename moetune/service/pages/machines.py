"""Pages of measurements: machines, one profile, and observed steps."""

from collections.abc import Iterable

from moetune.app.drift import observed_drifts
from moetune.app.files import bundled_profiles
from moetune.app.library import plans_by_id
from moetune.app.report import MOST_OBSERVATIONS
from moetune.app.views.observed import observed_sections
from moetune.app.views.profile import profile_sections
from moetune.domain.records import FitInfo, MachineInfo
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import Library, cursor
from moetune.service.pages.page import Link, Page, Text, address, age_now

_MOST_MACHINES = 200
PAGE_SIZE = 100


def machines_page(library: Library) -> Page:
    """Return the page of machines, and of the profiles measured on them."""
    machines = library.store.machines(limit=_MOST_MACHINES)
    newest = {fit.profile: fit for fit in reversed(library.fits())}
    sections = (
        _machines(machines, newest.values()),
        _profiles(library, newest),
        _references(library, set(newest)),
    )
    return Page(
        template="machines.html",
        title="Machines",
        here="machines",
        sections=tuple(one for one in sections if one.name != "references" or one.tables[0].rows),
        context={
            "intro": "The machines, and the quality of their measured profiles, which is that of "
            "the worst group of operations: good predicts left-out points within 5 %, usable "
            "within 10 %.",
        },
    )


def profile_page(library: Library, name: str, *, operation: Text = "") -> Page:
    """Return the page of one profile.

    Args:
        operation: key of the operation whose fit is drawn.

    Raises:
        NotFoundError: there is no such profile.
    """
    here = f"{address('profiles', name)}?operation="
    sections = profile_sections(library.profile(name), operation=operation, here=here)
    return Page(
        title=name,
        here="machines",
        sections=sections,
        csv=lambda figure: address("profiles", name, f"{figure.name}.csv", operation=operation),
        context={
            "scope": sections[0].scope,
            "links": (
                Link(name="Compare", href=address("compare", what="profiles", first=name)),
                Link(
                    name="Profile file",
                    href=address("v1", "profiles", name),
                    file=f"{name}.json",
                ),
            ),
        },
    )


def observed_page(library: Library, *, plan: Text = "", after: Text = "") -> Page:
    """Return the page of observations.

    Args:
        plan: beginning of a plan's id; "" for all plans.
        after: id of the last observation on the previous page; "" for the newest.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = plan.lower()
    plan_id = library.any_plan(plan).id if plan else None
    newest = library.store.observation_page(plan_id, limit=MOST_OBSERVATIONS)
    number = cursor(after)
    rows = newest[:PAGE_SIZE]
    if number:
        rows = library.store.observation_page(plan_id, after=number, limit=PAGE_SIZE)
    older = rows[-1].id if len(rows) == PAGE_SIZE else None
    return Page(
        template="observed.html",
        title="Observed",
        here="observed",
        sections=observed_sections(
            newest,
            rows,
            is_all=len(newest) < MOST_OBSERVATIONS,
            plans="/plans/",
            known=plans_by_id(library.store, {one.value.plan_id for one in rows}),
            changes=observed_drifts(newest),
        ),
        csv=lambda figure: address("observed", f"{figure.name}.csv", plan=plan),
        context={
            "plan": plan_id,
            "is_empty": not newest,
            "newer": address("observed", plan=plan) if number else "",
            "older": address("observed", plan=plan, after=str(older)) if older else "",
        },
    )


def _machines(machines: Iterable[MachineInfo], fits: Iterable[FitInfo]) -> Section:
    names: dict[int, list[str]] = {}
    for fit in fits:
        names.setdefault(fit.machine_id, []).append(fit.profile)
    table = Table(
        name="machines",
        title="Machines",
        header=(
            "device", "kind", "devices", "per node", "memory", "fingerprint", "profiles",
            "first seen",
        ),
        rows=tuple(
            (
                Cell.words(one.device),
                Cell.words(one.kind.upper()),
                Cell.count(one.num_devices),
                Cell.count(one.devices_per_node),
                Cell.size(one.memory_bytes),
                Cell.words(one.hardware_id if one.facts else "not known", mark="code"),
                Cell.words(", ".join(names.get(one.id, ())) or "none"),
                Cell.words(age_now(one.created_at)),
            )
            for one in machines
        ),
        empty="No machine was measured yet: run `moetune profile` on one.",
    )  # fmt: skip
    return Section(name="machines", tables=(table,))


def _profiles(library: Library, newest: dict[str, FitInfo]) -> Section:
    fits = sorted(newest.values(), key=lambda fit: fit.id, reverse=True)
    table = Table(
        name="profiles",
        title="Profiles",
        header=("profile", "provenance", "machine", "quality", "samples", "fitted"),
        rows=tuple(
            (
                Cell.words(fit.profile, href=address("profiles", fit.profile)),
                Cell.words(fit.provenance),
                *_quality(library, fit.profile),
                Cell.count(fit.num_samples),
                Cell.words(age_now(fit.created_at)),
            )
            for fit in fits
        ),
        empty="No profile is stored yet.",
    )
    return Section(name="profiles", tables=(table,))


def _references(library: Library, stored: set[str]) -> Section:
    table = Table(
        name="references",
        title="Reference machines",
        header=("profile", "provenance", "machine", "quality", "source"),
        rows=tuple(
            (
                Cell.words(name, href=address("profiles", name)),
                Cell.words(library.summary(name).provenance),
                *_quality(library, name),
                Cell.words(library.summary(name).citation),
            )
            for name in bundled_profiles()
            if name not in stored
        ),
    )
    return Section(name="references", tables=(table,))


def _quality(library: Library, name: str) -> tuple[Cell, Cell]:
    found = library.summary(name)
    return (
        Cell.words(found.scope),
        Cell.words(found.quality or "not known", mark=found.quality),
    )
