"""Calibrations of questions by the runs that a store has of the same machine and runtime."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moetune.domain.profile import Profile
from moetune.domain.records import Calibration, ObservedRun
from moetune.domain.targets import Target
from moetune.report.section import plural
from moetune.solve.model.calibration import calibration_of

if TYPE_CHECKING:
    from moetune.store import SqlStore


def stored_runs(store: "SqlStore | None", profile: Profile) -> tuple[ObservedRun, ...]:
    """Return the runs that were predicted with a profile as it is now, the newest first.

    Those of a profile that was measured again since do not say how far its predictions are off.
    """
    if store is None:
        return ()
    stored = store.observed_runs(profile_fingerprint=profile.digest)
    return tuple(row.value for row in stored)


def earlier_runs_note(store: "SqlStore | None", profile: Profile) -> str:
    """Return what to do where all runs of a profile are of what it was before; else ""."""
    runs = store.observed_runs(profile=profile.name) if store is not None else ()
    if not runs or any(run.value.profile_fingerprint == profile.digest for run in runs):
        return ""
    observed = plural(len(runs), "observed run")
    return (
        f"profile {profile.name} has changed since its {observed}, so that no plan is calibrated: "
        "observe again with a new plan"
    )


def calibration_for(
    runs: Iterable[ObservedRun], *, model: str, target: Target
) -> Calibration | None:
    """Return the calibration of a model's steps under a runtime; None without any run of both.

    Args:
        runs: of `stored_runs`.
    """
    same = [run for run in runs if (run.target, run.target_version) == (target.name, target.number)]
    return calibration_of(same, model=model, target=target.name)
