"""Pages of measurements: machines, and one profile."""

from collections.abc import Iterable
from datetime import UTC, datetime
from types import MappingProxyType

from moetune.app.files import bundled_profiles
from moetune.app.planner import ServicePlanner
from moetune.app.views.profile import profile_sections
from moetune.domain.records import FitInfo, MachineInfo
from moetune.report.html import age
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import (
    Summary,
    newest_fits,
    stored_profile,
    summary_of,
)
from moetune.service.pages.page import Link, Page, address

_MOST_MACHINES = 200
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


def machines_page(planner: ServicePlanner) -> Page:
    """Return the page of machines, and of the profiles measured on them."""
    machines = planner.reading.machines(limit=_MOST_MACHINES)
    newest = {fit.profile: fit for fit in reversed(newest_fits(planner))}
    tables = (
        _machines(machines, newest.values()),
        _profiles(planner, newest.values()),
        _references(planner, [name for name in bundled_profiles() if name not in newest]),
    )
    return Page(
        title="Machines",
        here="machines",
        intro="The machines, and the quality of their measured profiles, which is that of the "
        "worst group of operations: good predicts left-out points within 5 %, usable within 10 %.",
        sections=tuple(
            Section(name=table.name, tables=(table,))
            for table in tables
            if table.name != "references" or table.rows
        ),
        commands=_COMMANDS,
    )


def profile_page(planner: ServicePlanner, name: str) -> Page:
    """Return the page of one profile.

    Raises:
        NotFoundError: there is no such profile.
    """
    sections = profile_sections(stored_profile(planner, name))
    file = address("v1", "profiles", name)
    return Page(
        title=name,
        here="machines",
        scope=sections[0].scope,
        links=(Link(name="Profile file", href=file, file=f"{name}.json"),),
        sections=sections,
    )


def _machines(machines: Iterable[MachineInfo], fits: Iterable[FitInfo]) -> Table:
    names: dict[int, list[str]] = {}
    for fit in fits:
        names.setdefault(fit.machine_id, []).append(fit.profile)
    return Table.of(
        "machines",
        machines,
        {
            "device": lambda machine: machine.device,
            "kind": lambda machine: machine.kind.upper(),
            "devices": lambda machine: Cell.count(machine.num_devices),
            "per node": lambda machine: Cell.count(machine.devices_per_node),
            "memory": lambda machine: Cell.size(machine.memory_bytes),
            "fingerprint": lambda machine: Cell.words(
                machine.hardware_id if machine.facts else "not known", mark="code"
            ),
            "profiles": lambda machine: ", ".join(names.get(machine.id, ())) or "none",
            "first seen": lambda machine: _age(machine.created_at),
        },
        title="Machines",
        empty="No machine was measured yet: run `moetune profile` on machine.",
    )


def _profiles(planner: ServicePlanner, fits: Iterable[FitInfo]) -> Table:
    return Table.of(
        "profiles",
        sorted(fits, key=lambda fit: fit.id, reverse=True),
        {
            "profile": lambda fit: _link(fit.profile),
            "provenance": lambda fit: fit.provenance,
            "machine": lambda fit: summary_of(planner, fit.profile).scope,
            "quality": lambda fit: _quality(summary_of(planner, fit.profile)),
            "samples": lambda fit: Cell.count(fit.num_samples),
            "fitted": lambda fit: _age(fit.created_at),
        },
        title="Profiles",
        empty="No profile is stored yet.",
    )


def _references(planner: ServicePlanner, names: Iterable[str]) -> Table:
    return Table.of(
        "references",
        names,
        {
            "profile": _link,
            "provenance": lambda name: summary_of(planner, name).provenance,
            "machine": lambda name: summary_of(planner, name).scope,
            "quality": lambda name: _quality(summary_of(planner, name)),
            "source": lambda name: summary_of(planner, name).citation,
        },
        title="Reference machines",
    )


def _link(name: str) -> Cell:
    return Cell.words(name, href=address("profiles", name))


def _quality(summary: Summary) -> Cell:
    return Cell.words(summary.quality or "not known", mark=summary.quality)


def _age(created_at: str) -> str:
    return age(created_at, datetime.now(UTC))
