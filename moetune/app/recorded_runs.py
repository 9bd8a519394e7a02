"""Observed runs in the store: kept, listed by their plan, and removed."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from moetune.app.calibration import calibration_for
from moetune.app.observe import Observed
from moetune.domain.errors import InputError
from moetune.domain.targets import planned_target

if TYPE_CHECKING:
    from moetune.store import SqlStore


def kept(store: "SqlStore", observed: Observed) -> Observed:
    """Keep an observed run, and return it with the calibration that follows.

    Raises:
        StoreUnavailableError: the database is locked, full or unreachable.
    """
    number = store.add_observed_run(observed.run)
    prediction = observed.prediction
    stored = store.observed_runs(profile_fingerprint=prediction.profile_fingerprint)
    target = planned_target(prediction.target, prediction.target_version)
    calibration = calibration_for(
        (row.value for row in stored), model=prediction.model, target=target
    )
    return replace(observed, number=number, calibration=calibration)


def numbers_of(ids: Iterable[str]) -> tuple[list[int], list[int]]:
    """Return the numbers of observed steps and of observed runs, whose ids begin with r.

    Raises:
        InputError: an id is of neither.
    """
    steps, runs = list[int](), list[int]()
    for text in ids:
        number = text.removeprefix("r")
        if not number.isdigit():
            hint = "`moetune observations list` has them: 17 of a layer's steps, r3 of a run"
            raise InputError(f"{text!r} is no id of an observation", hint)
        (runs if text.startswith("r") else steps).append(int(number))
    return steps, runs
