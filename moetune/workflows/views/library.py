"""Lists of stored plans and observations as sections."""

from collections.abc import Sequence

from moetune.domain.records import Observation, PlanInfo, Stored
from moetune.domain.storable import is_sound
from moetune.report.observed import seen
from moetune.report.section import Cell, Section, Table

MOST_ROWS = 20
"""Rows of a list that is not asked for whole."""


def plans_section(found: Sequence[PlanInfo], *, most: int | None = MOST_ROWS) -> Section:
    """Return the table of plans, the first `most` of them; None for all."""
    rows = tuple(
        (
            Cell(text=one.id[:12], value=one.id, mark="code"),
            Cell.words(one.model or "a layer"),
            Cell.words(one.profile),
            Cell.count(one.world_size),
            Cell.count(one.tokens_per_rank),
            Cell.words(_minute(one.created_at)),
        )
        for one in found[:most]
    )
    table = Table(
        name="plans",
        header=("plan", "model", "profile", "ranks", "tokens per rank", "made, UTC"),
        rows=rows,
        empty="No plan matches; `moetune plan` makes one.",
        notes=_more(len(found) - len(rows)),
    )
    return Section(name="plans", tables=(table,))


def observations_section(
    found: Sequence[Stored[Observation]], *, most: int | None = MOST_ROWS
) -> Section:
    """Return the table of observations, the first `most` of them; None for all.

    One with times that no step takes has no error of its prediction.
    """
    shown = found[:most]
    ratios = {one.id: one.ratio - 1 for one in seen(shown)}
    rows = tuple(
        (
            Cell.count(one.id),
            Cell.words(_minute(one.created_at)),
            Cell(text=one.value.plan_id[:12], value=one.value.plan_id, mark="code"),
            Cell.words(one.value.source),
            Cell.count(one.value.tokens_per_rank),
            Cell.count(len(one.value.seconds)),
            Cell.share(ratios[one.id], sign=True)
            if is_sound(one.value)
            else Cell.words("no step takes its time", mark="suspect"),
        )
        for one in shown
    )
    table = Table(
        name="observations",
        header=("id", "time, UTC", "plan", "source", "tokens per rank", "steps", "error"),
        rows=rows,
        empty="Nothing was observed yet.",
        notes=_more(len(found) - len(rows)),
    )
    return Section(name="observations", tables=(table,))


def _minute(created_at: str) -> str:
    return created_at[:16].replace("T", " ")


def _more(count: int) -> tuple[str, ...]:
    return (f"… and {count:,} more: --all",) if count > 0 else ()
