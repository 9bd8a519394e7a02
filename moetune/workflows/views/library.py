"""Lists of stored plans and observations as sections."""

from collections.abc import Sequence

from moetune.domain.records import Observation, Stored
from moetune.domain.storable import is_sound
from moetune.report.observed import seen
from moetune.report.section import Cell, Section, Table


def observations_section(found: Sequence[Stored[Observation]]) -> Section:
    """Return the table of observations.

    One with times that no step takes has no error of its prediction.
    """
    errors = {one.id: one.error for one in seen(found)}
    rows = tuple(
        (
            Cell.count(one.id),
            Cell.words(_minute(one.created_at)),
            Cell(text=one.value.plan_id[:12], value=one.value.plan_id, mark="code"),
            Cell.words(one.value.source),
            Cell.count(one.value.tokens_per_rank),
            Cell.count(len(one.value.seconds)),
            Cell.share(errors[one.id], sign=True)
            if is_sound(one.value)
            else Cell.words("no step takes its time", mark="suspect"),
        )
        for one in found
    )
    table = Table(
        name="observations",
        header=("id", "time, UTC", "plan", "source", "tokens per rank", "steps", "error"),
        rows=rows,
        empty="Nothing was observed yet.",
    )
    return Section(name="observations", tables=(table,))


def _minute(created_at: str) -> str:
    return created_at[:16].replace("T", " ")
