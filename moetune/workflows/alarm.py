"""The drift alarm of each series of a store's observations: steps and operations."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moetune.domain.layer import PHASES
from moetune.domain.records import Observation, Stored
from moetune.domain.storable import is_sound
from moetune.domain.units import format_seconds, format_share
from moetune.fit.drift import LIMIT, NUM_FIRST, NUM_SKIPPED, Watched, watch

WatchedPhase: TypeAlias = Literal["step", "forward", "backward"]
_ORDER: tuple[WatchedPhase, ...] = ("step", *PHASES)
_NEEDED = NUM_SKIPPED + NUM_FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSeries:
    """Times of a plan's step, or of one of its operations, as one source reported them.

    Args:
        name: "step", or the operation in words.
        at: when each time was stored, UTC, ISO 8601.
        states: what the alarm thinks after each time; its steps are ids of observations.
    """

    plan_id: str
    source: str
    phase: WatchedPhase
    name: str
    at: tuple[str, ...]
    states: tuple[Watched, ...]

    @property
    def last_change(self) -> Watched | None:
        """The newest time that made a change certain."""
        return next((one for one in reversed(self.states) if one.drift is not None), None)

    @property
    def share(self) -> float:
        """Share of the way to an alarm that the sums have gone: 0 to 1."""
        return max(self.states[-1].longer, self.states[-1].shorter) / LIMIT

    @property
    def words(self) -> str:
        """The series in a sentence."""
        last, change = self.states[-1], self.last_change
        who = f"{self.name} of plan {self.plan_id[:6]}"
        changed = f"{who} has {self._changed_words}" if change is not None else ""
        if last.drift is not None:
            return changed
        if last.band_seconds is None or last.before_seconds is None:
            if changed:
                return f"{changed}; the next are compared once {NUM_FIRST} are known since"
            count = f"{len(self.states)} of the {_NEEDED} times"
            return f"{who}: {count} that the next are compared with are known"
        low, high = map(format_seconds, last.band_seconds)
        middle, share = format_seconds(last.before_seconds), format_share(self.share, digits=0)
        near = "unchanged" if self.share <= 1 / 2 else "beginning to look changed"
        band = f"times from {low} to {high} count as the {middle} before"
        now = f"{near} ({band}; the alarm's sum is at {share} of its limit)"
        return f"{changed}; since then it is {now}" if changed else f"{who} is {now}"

    @property
    def _changed_words(self) -> str:
        change = self.last_change
        assert change is not None  # noqa: S101 - the caller has looked
        assert change.drift is not None  # noqa: S101 - of a change
        at = next(
            at
            for at, state in zip(self.at, self.states, strict=True)
            if state.step == change.drift.since_step
        )
        kind = "longer" if change.drift.factor > 1 else "shorter"
        return (
            f"taken {kind} since {at[:16].replace('T', ' ')} UTC: "
            f"{format_seconds(change.drift.seconds)}, {change.drift.factor:.2f} × the "
            f"{format_seconds(change.drift.before_seconds)} before"
        )


_Times: TypeAlias = list[tuple[Stored[Observation], float]]


def watched_series(rows: Iterable[Stored[Observation]]) -> tuple[WatchedSeries, ...]:
    """Return every series: of the newest plans first, its steps, forward and backward operations.

    Steps are watched by the alarm's own rule, as their operations are.

    Args:
        rows: in any order; those with times that no step takes are left out.
    """
    found: dict[tuple[str, str, WatchedPhase, str], _Times] = {}
    for row in sorted((one for one in rows if is_sound(one.value)), key=lambda one: one.id):
        for key, seconds in _times(row.value):
            found.setdefault(key, []).extend((row, one) for one in seconds)
    newest = sorted(
        found.items(), key=lambda one: (-one[1][-1][0].id, _ORDER.index(one[0][2]), one[0][3])
    )
    return tuple(
        WatchedSeries(
            plan_id=plan_id, source=source, phase=phase, name=name,
            at=tuple(row.created_at for row, _ in times),
            states=watch((row.id, seconds) for row, seconds in times),
        )
        for (plan_id, source, phase, name), times in newest
    )  # fmt: skip


def _times(
    one: Observation,
) -> Iterator[tuple[tuple[str, str, WatchedPhase, str], tuple[float, ...]]]:
    if all(one.seconds):
        yield (one.plan_id, one.source, "step", "step"), one.seconds
    for each in one.operations:
        name = each.operation.words
        yield (one.plan_id, one.source, each.operation.phase, name), each.seconds
