"""Pages of measurements: the machines, and a profile."""

from types import MappingProxyType

from moetune.app.planner import ServicePlanner
from moetune.app.profiles import list_profiles
from moetune.app.views.observed import observed_runs
from moetune.app.views.profile import profile_sections
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import Summary, stored_profile, summary_of
from moetune.service.pages.page import Link, Page, address

_COMMANDS = MappingProxyType(
    {
        "Add a profile with the write token; the newest of a name is current": (
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


def machines_page(planner: ServicePlanner) -> Page:
    """Return the page of profiles: measured machines, newest first, then reference machines."""
    table = Table.of(
        "profiles",
        [(info, summary_of(planner, info.name)) for info in list_profiles(planner.reading)],
        {
            "profile": lambda row: Cell.words(
                row[0].name, href=address("profiles", row[0].name) if row[1] else ""
            ),
            "provenance": lambda row: row[0].provenance,
            "machine": lambda row: f"{row[0].num_devices:,} × {row[0].device}",
            "quality": lambda row: _quality(row[1]),
            "samples": lambda row: Cell.count(row[0].num_samples),
            "from": lambda row: row[0].created_at[:10] or (row[1].citation if row[1] else ""),
        },
    )
    return Page(
        title="Machines",
        here="machines",
        intro="Profiles of machines, the reference machines last. Their quality is that of the "
        "worst group of operations: good predicts left-out points within 5 %, usable within 10 %.",
        sections=(Section(name="profiles", tables=(table,)),),
        commands=_COMMANDS,
    )


def profile_page(planner: ServicePlanner, name: str) -> Page:
    """Return the page of one profile, or raise NotFoundError."""
    machine = stored_profile(planner, name)
    sections = profile_sections(machine)
    observed = observed_runs(planner.reading, machine.profile.digest)
    file = address("v1", "profiles", name)
    return Page(
        title=name,
        here="machines",
        scope=sections[0].scope,
        links=(Link(name="Profile file", href=file, file=f"{name}.json"),),
        sections=(*sections, *observed),
    )


def _quality(summary: Summary | None) -> Cell:
    if summary is None:
        return Cell.words("not finished")
    return Cell.words(summary.quality or "not known", mark=summary.quality)
