"""`moetune doctor`: this installation, and the settings that apply."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moetune.cli.commands import command
from moetune.cli.render import Screen
from moetune.cli.session import Session
from moetune.domain.document import encode
from moetune.domain.units import format_bytes
from moetune.report.section import Cell, Section, Table, plural
from moetune.report.section import facts as facts_table

if TYPE_CHECKING:
    from moetune.app.doctor import Diagnosis, Finding


@command("moetune doctor --json > report.json")
def doctor(session: Session) -> int:
    """Print this installation and its problems.

    Machine, software, database and settings: everything that a bug report needs.
    """
    from moetune.app.doctor import DOCTOR_SCHEMA, examine

    report = examine(session.configuration())
    if session.as_json:
        session.screen.document({"schema": DOCTOR_SCHEMA, **encode(report)})
    else:
        _show(session.screen, report)
    return report.exit_code


def _show(screen: Screen, report: "Diagnosis") -> None:
    _show_machine(screen, report)
    _show_store(screen, report)
    screen.say("Settings", style="bold")
    screen.table(_settings_table(report.settings, report.origins))
    _facts(screen, "Versions", report.versions)


def _show_machine(screen: Screen, report: "Diagnosis") -> None:
    screen.say("Machine", style="bold")
    if report.cluster is None:
        _problem(screen, report.machine_problem)
        return
    machine = report.cluster.machine
    screen.say(
        f"{machine.kind.upper()} · {machine.device} · "
        f"{format_bytes(machine.memory_bytes)} of memory per device",
        indent=2,
    )
    for note in report.cluster.notes:
        screen.say(f"note: {note}", indent=2)
    fingerprint = report.cluster.fingerprint
    _facts(screen, f"Hardware fingerprint {report.hardware_id}", fingerprint.hardware)
    _facts(screen, f"Software fingerprint {report.software_id}", fingerprint.software)


def _show_store(screen: Screen, report: "Diagnosis") -> None:
    store = report.store
    screen.say("Store", style="bold")
    screen.line(f"  {store.location}")
    if store.revision is None and store.problem is None:
        screen.say("There is no database yet; the first profile or plan makes it.", indent=2)
    elif store.revision is not None:
        screen.say(
            f"Schema {store.revision}, this moetune needs {store.wanted} · "
            f"{plural(store.num_runs, 'run')}, {plural(store.num_plans, 'plan')}",
            indent=2,
        )
    _problem(screen, store.problem)


def _problem(screen: Screen, problem: "Finding | None") -> None:
    if problem is not None:
        screen.line(f"  problem: {problem.error}")
        screen.line(f"    {problem.hint}")


def _facts(screen: Screen, title: str, facts: Mapping[str, str]) -> None:
    screen.section(
        Section(name="facts", title=title, tables=(facts_table("facts", facts.items()),))
    )


def _settings_table(settings: Mapping[str, object], origins: Mapping[str, str]) -> Table:
    """Return the settings, their values, and the source of each."""
    rows = ((name, _shown(value), origins[name]) for name, value in settings.items())
    return Table(
        name="settings",
        header=("setting", "value", "from"),
        rows=tuple(tuple(map(Cell.words, row)) for row in rows),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "—" if value is None else str(value)
