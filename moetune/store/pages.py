"""Lists, newest first and a page at a time. Each runs in its caller's transaction.

A page begins behind the entry that was seen last, and not at a number of entries: what comes
meanwhile moves nothing from one page to another.
"""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, select, tuple_

from moetune.domain.errors import NotFoundError
from moetune.domain.records import FitInfo, Kept, MachineInfo, Observation, PlanInfo, RunInfo
from moetune.store import rows
from moetune.store.schema import fits, machines, observations, plans, runs, samples

_LARGEST_ID = 2**31 - 1  # of an Integer column


def all_runs(connection: Connection) -> tuple[RunInfo, ...]:
    """Return every run."""
    query = (
        select(
            *(runs.c[name] for name in ("id", "name", "provenance", "preset", "status")),
            runs.c.created_at,
            machines.c.device,
            machines.c.num_devices,
            _number_of_samples().correlate(runs).scalar_subquery().label("num_samples"),
        )
        .join(machines)
        .order_by(runs.c.id.desc())
    )
    return tuple(rows.run_info(row) for row in connection.execute(query).mappings())


def machines_page(connection: Connection, *, after: int, limit: int) -> tuple[MachineInfo, ...]:
    """Return a page of the machines."""
    query = select(*(machines.c[name] for name in MachineInfo.__dataclass_fields__))
    found = connection.execute(_behind(query, machines.c.id, after, limit))
    return tuple(rows.machine_info(row) for row in found.mappings())


def fits_page(connection: Connection, *, after: int, limit: int) -> tuple[FitInfo, ...]:
    """Return a page of the fits."""
    fitted_to = _number_of_samples().where(samples.c.id <= fits.c.last_sample_id)
    query = select(
        fits.c.id,
        fits.c.name.label("profile"),
        runs.c.machine_id,
        runs.c.provenance,
        fitted_to.correlate(runs, fits).scalar_subquery().label("num_samples"),
        fits.c.created_at,
    ).join(runs)
    found = connection.execute(_behind(query, fits.c.id, after, limit))
    return tuple(rows.fit_info(row) for row in found.mappings())


def plans_page(
    connection: Connection, *, after: str = "", limit: int | None = None
) -> tuple[PlanInfo, ...]:
    """Return a page of the plans; without a limit, all that follow.

    Raises:
        NotFoundError: there is no plan `after`.
    """
    place = tuple_(plans.c.created_at, plans.c.id)
    query = (
        select(*(plans.c[name] for name in PlanInfo.__dataclass_fields__))
        .order_by(plans.c.created_at.desc(), plans.c.id.desc())
        .limit(limit)
    )
    if after:
        seen = connection.execute(
            select(plans.c.created_at, plans.c.id).where(plans.c.id == after)
        ).first()
        if seen is None:
            raise NotFoundError(
                f"there is no plan {after[:12]!r} to go on after", "begin with the first page"
            )
        query = query.where(place < tuple_(*seen))
    return tuple(rows.plan_info(row) for row in connection.execute(query).mappings())


def observations_page(
    connection: Connection, plan_id: str | None, *, after: int, limit: int
) -> tuple[Kept[Observation], ...]:
    """Return a page of the observations of a plan, or of all for None."""
    query = select(observations)
    if plan_id is not None:
        query = query.where(observations.c.plan_id == plan_id)
    found = connection.execute(_behind(query, observations.c.id, after, limit))
    return tuple(rows.kept_observation(row) for row in found.mappings())


def _number_of_samples() -> Select[Any]:
    return select(func.count()).where(samples.c.run_id == runs.c.id)


def _behind(query: Select[Any], number: ColumnElement[int], after: int, limit: int) -> Select[Any]:
    if after:
        query = query.where(number < min(after, _LARGEST_ID))
    return query.order_by(number.desc()).limit(limit)
