"""Pages of measurements: machines, one profile, and observed steps."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from moetune.app.drift import observed_drifts
from moetune.app.files import bundled_profiles
from moetune.app.library import plans_by_id
from moetune.app.report import MOST_OBSERVATIONS
from moetune.app.views.observed import observed_sections
from moetune.app.views.profile import profile_sections
from moetune.domain.records import FitInfo, MachineInfo
from moetune.report.html import age
from moetune.report.section import Cell, Section, Table
from moetune.service.bodies import RowCursor
from moetune.service.pages.library import Library
from moetune.service.pages.page import Form, Link, Page, Text, address

_MOST_MACHINES = 200
PAGE_SIZE = 100
_COMMANDS = MappingProxyType(
    {
        "Add a profile with the write token; the newest of a name is the current one": (
            "moetune profiles export NAME --output lab.toml\n"
            'curl --fail-with-body "$MOETUNE_URL/v1/profiles" -H "Authorization: Bearer '
            "$MOETUNE_TOKEN\" -H 'Content-Type: application/toml' --data-binary @lab.toml"
        ),
        "Describe a machine that you cannot measure yet: a reference machine stands in for what "
        "is not said, plans made from it are labelled modelled, and the guide's page "
        '"The profile file" explains each key': (
            "moetune profiles new ours.toml --gpu h100 --gpus-per-node 8 --nodes 8 --nics 8 "
            "--nic-rate 400Gbit/s"
        ),
    }
)


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
        title="Machines",
        here="machines",
        intro="The machines, and the quality of their measured profiles, which is that of the "
        "worst group of operations: good predicts left-out points within 5 %, usable within 10 %.",
        sections=tuple(
            section
            for section in sections
            if section.name != "references" or section.tables[0].rows
        ),
        commands=_COMMANDS,
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
    file = address("v1", "profiles", name)
    return Page(
        title=name,
        here="machines",
        scope=sections[0].scope,
        links=(
            Link(name="Compare", href=address("compare", what="profiles", first=name)),
            Link(name="Profile file", href=file, file=f"{name}.json"),
        ),
        sections=sections,
    )


def observed_page(library: Library, *, plan: Text = "", after: RowCursor = 0) -> Page:
    """Return the page of observations.

    Args:
        plan: beginning of a plan's id; "" for all plans.
        after: id of the last observation on the previous page; 0 for the newest.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan = plan.lower()
    plan_id = library.any_plan(plan).id if plan else ""
    newest = library.store.observation_page(plan_id or None, limit=MOST_OBSERVATIONS)
    rows = newest[:PAGE_SIZE]
    if after:
        rows = library.store.observation_page(plan_id or None, after=after, limit=PAGE_SIZE)
    older = str(rows[-1].id) if len(rows) == PAGE_SIZE else ""
    sections = observed_sections(
        newest,
        rows,
        is_all=len(newest) < MOST_OBSERVATIONS,
        plans="/plans/",
        known=plans_by_id(library.store, {row.value.plan_id for row in rows}),
        changes=observed_drifts(newest),
    )
    links = (
        Link(name=f"Plan {plan_id[:12]}", href=address("plans", plan_id)),
        Link(name="All plans", href="/observed"),
    )
    intro = "Measured steps compared with their plans' predictions."
    if not newest:
        intro += (
            f" They come from `moetune verify {plan_id[:12] or 'PLAN'}`, and from training jobs "
            "that get their plans from this service."
        )
    field = replace(library.plan_field("plan", "Only of plan"), is_required=False)
    form = Form(action="/observed", button="Show", fields=(field,), values={"plan": plan_id[:12]})
    return Page(
        title="Observed",
        here="observed",
        intro=intro,
        links=links if plan_id else (),
        forms=(form,),
        sections=sections,
        newer=address("observed", plan=plan) if after else "",
        older=address("observed", plan=plan, after=older) if older else "",
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
                Cell.words(machine.device),
                Cell.words(machine.kind.upper()),
                Cell.count(machine.num_devices),
                Cell.count(machine.devices_per_node),
                Cell.size(machine.memory_bytes),
                Cell.words(machine.hardware_id if machine.facts else "not known", mark="code"),
                Cell.words(", ".join(names.get(machine.id, ())) or "none"),
                _age(machine.created_at),
            )
            for machine in machines
        ),
        empty="No machine was measured yet: run `moetune profile` on machine.",
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
                _age(fit.created_at),
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
    summary = library.summary(name)
    return (
        Cell.words(summary.scope),
        Cell.words(summary.quality or "not known", mark=summary.quality),
    )


def _age(created_at: str) -> Cell:
    return Cell.words(age(created_at, datetime.now(UTC)))
