"""Diagnosis of an installation for a bug report: machine, software, database, settings."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from moetune.app import wiring
from moetune.config import Configuration, Settings, without_password
from moetune.domain.cluster import Cluster
from moetune.domain.document import ErrorDocument, encode
from moetune.domain.errors import MissingPackageError, MoetuneError

DOCTOR_SCHEMA = "moetune.doctor/1"
PACKAGES = (
    "moetune", "torch", "numpy", "sqlalchemy", "alembic", "optuna", "typer", "rich", "psycopg",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """State of the database.

    Args:
        revision: of its schema; None if there is no database yet, or it cannot be read.
        wanted: revision that this version needs; None if the database cannot be read.
    """

    location: str
    revision: str | None = None
    wanted: str | None = None
    num_runs: int = 0
    num_plans: int = 0
    problem: ErrorDocument | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `moetune doctor`.

    Args:
        versions: version of each package; "not installed" for an absent package.
        cluster: as a single rank sees it; None if it could not be detected.
    """

    versions: Mapping[str, str]
    cluster: Cluster | None
    hardware_id: str | None
    software_id: str | None
    machine_problem: ErrorDocument | None
    store: StoreReport
    settings: Mapping[str, object]
    origins: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """Exit code of the first problem; 0 without problems."""
        problem = self.store.problem or self.machine_problem
        return problem.exit_code if problem else 0


def examine(configuration: Configuration) -> Diagnosis:
    """Return the diagnosis of this machine; it holds problems instead of raising them."""
    cluster, problem, settings = None, None, configuration.settings
    try:
        cluster = wiring.detect_cluster()
    except MoetuneError as error:
        problem = _finding(error)
    return Diagnosis(
        versions=_versions(),
        cluster=cluster,
        hardware_id=cluster.fingerprint.hardware_id if cluster else None,
        software_id=cluster.fingerprint.software_id if cluster else None,
        machine_problem=problem,
        store=_store_report(settings),
        settings={**encode(settings), "db": without_password(settings.db)},
        origins=configuration.origins,
    )


def _store_report(settings: Settings) -> StoreReport:
    from moetune.store import current

    report = StoreReport(location=without_password(settings.db))
    try:
        state = current(settings.db)
        report = replace(report, revision=state.revision, wanted=state.head)
        with wiring.find_store(settings, upgrades=False) as store:
            if store is None:
                return report
            return replace(report, num_runs=len(store.runs()), num_plans=len(store.plans()))
    except MoetuneError as error:
        return replace(report, problem=_finding(error))


def _finding(error: MoetuneError) -> ErrorDocument:
    # Planning alone needs no package that is missing.
    exit_code = 0 if isinstance(error, MissingPackageError) else error.exit_code
    return ErrorDocument(error=error.what, hint=error.hint, exit_code=exit_code)


def _versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions["executable"] = sys.executable
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
