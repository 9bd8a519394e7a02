"""`moetune doctor`: this installation, and the settings that apply."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moetune.cli.commands import command
from moetune.cli.session import Session
from moetune.domain.document import ErrorDocument, encode
from moetune.domain.units import format_bytes
from moetune.report.section import Cell, Section, Table, plural
from moetune.report.section import facts as facts_table

if TYPE_CHECKING:
    from moetune.app.doctor import Diagnosis, StoreReport


@command("moetune doctor --json > report.json")
def doctor(session: Session) -> int:
    """Print this installation and its problems.

    Machine, software, database and settings: everything that a bug report needs.
    """
    from moetune.app.doctor import DOCTOR_SCHEMA, examine

    report = examine(session.configuration())
    document = {"schema": DOCTOR_SCHEMA, **encode(report)}
    session.screen.show(document, lambda: _sections(report))
    return report.exit_code


def _sections(report: "Diagnosis") -> Iterator[Section]:
    yield from _machine(report)
    yield Section(name="store", title="Store", paragraphs=tuple(_store_words(report.store)))
    settings = _settings_table(report.settings, report.origins)
    yield Section(name="settings", title="Settings", tables=(settings,))
    yield _facts("Versions", report.versions)


def _machine(report: "Diagnosis") -> Iterator[Section]:
    if report.cluster is None:
        yield Section(name="machine", title="Machine", paragraphs=_problem(report.machine_problem))
        return
    machine, fingerprint = report.cluster.machine, report.cluster.fingerprint
    words = (
        f"{machine.kind.upper()} · {machine.device} · "
        f"{format_bytes(machine.memory_bytes)} of memory per device"
    )
    notes = (f"note: {note}" for note in report.cluster.notes)
    yield Section(name="machine", title="Machine", paragraphs=(words, *notes))
    yield _facts(f"Hardware fingerprint {report.hardware_id}", fingerprint.hardware)
    yield _facts(f"Software fingerprint {report.software_id}", fingerprint.software)


def _store_words(store: "StoreReport") -> Iterator[str]:
    yield store.location
    if store.revision is None and store.problem is None:
        yield "There is no database yet; the first profile or plan makes it."
    elif store.revision is not None:
        yield (
            f"Schema {store.revision}, this moetune needs {store.wanted} · "
            f"{plural(store.num_runs, 'run')}, {plural(store.num_plans, 'plan')}"
        )
    yield from _problem(store.problem)


def _problem(problem: ErrorDocument | None) -> tuple[str, ...]:
    return () if problem is None else (f"problem: {problem.error}", problem.hint)


def _facts(title: str, facts: Mapping[str, str]) -> Section:
    return Section(name="facts", title=title, tables=(facts_table("facts", facts.items()),))


def _settings_table(settings: Mapping[str, object], origins: Mapping[str, str]) -> Table:
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
