"""Operations whose time changed, in the observations of a store: for the service and `verify`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.operations import Operation
from moetune.domain.records import Observation, Stored
from moetune.domain.units import format_seconds
from moetune.fit.drift import Drift, drifts

DRIFT_SCHEMA = "moetune.drift/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDrift:
    """A change of an operation's time under one plan.

    Args:
        since: time at which the first changed observation was stored, UTC, ISO 8601.
        predicted_seconds: of the plan, with nothing beside it; None where it predicted none.
        drift: its steps are ids of observations.
    """

    plan_id: str
    operation: Operation
    since: str
    predicted_seconds: float | None
    drift: Drift

    @property
    def words(self) -> str:
        """The change in a sentence."""
        drift = self.drift
        kind = "longer" if drift.factor > 1 else "shorter"
        return (
            f"{self.operation.words} of plan {self.plan_id[:6]} takes {kind} since "
            f"{self.since[:16].replace('T', ' ')} UTC: {format_seconds(drift.seconds)}, "
            f"{drift.factor:.2f} × the {format_seconds(drift.before_seconds)} before"
        )


def observed_drifts(rows: Iterable[Stored[Observation]]) -> tuple[OperationDrift, ...]:
    """Return every change of an operation, the newest first.

    Args:
        rows: in any order; those of one plan are compared with each other.
    """
    series: dict[tuple[str, Operation, str], list[tuple[Stored[Observation], float]]] = {}
    predicted: dict[tuple[str, Operation, str], float | None] = {}
    sound = (row for row in rows if row.value.is_sound)
    for row in sorted(sound, key=lambda row: row.id):
        for times in row.value.operations:
            key = row.value.plan_id, times.operation, row.value.source
            series.setdefault(key, []).extend((row, seconds) for seconds in times.seconds)
            predicted[key] = times.predicted_seconds
    changes = [
        OperationDrift(
            plan_id=plan_id, operation=operation, since=since, drift=drift,
            predicted_seconds=predicted[plan_id, operation, source],
        )
        for (plan_id, operation, source), times in series.items()
        for since, drift in _drifts(times)
    ]  # fmt: skip
    return tuple(sorted(changes, key=lambda change: change.drift.seen_step, reverse=True))


def _drifts(times: Sequence[tuple[Stored[Observation], float]]) -> Iterator[tuple[str, Drift]]:
    times_by_id = {row.id: row.created_at for row, _ in times}
    for drift in drifts((row.id, seconds) for row, seconds in times):
        yield times_by_id[drift.since_step], drift
