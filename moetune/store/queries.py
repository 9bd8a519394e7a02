"""Statements that several methods of the store share. Each runs in its caller's transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.records import FitInfo, MachineInfo, Observation, PlanInfo, RunInfo, Stored
from moetune.domain.samples import Sample
from moetune.store import rows
from moetune.store.schema import fits, machines, observations, plans, runs, samples


def require_run(connection: Connection, run_id: int) -> None:
    """Raise InputError unless there is such a run."""
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise InputError(f"there is no run {run_id}", "see `moetune profiles list`")


def require_plans(connection: Connection, plan_ids: Sequence[str], where: str) -> None:
    """Raise InputError, which names the first one, unless all of the plans are stored."""
    wanted = tuple(dict.fromkeys(plan_ids))
    known = set(connection.execute(select(plans.c.id).where(plans.c.id.in_(wanted))).scalars())
    for plan_id in wanted:
        if plan_id not in known:
            raise InputError(
                f"there is no plan {plan_id[:12]!r} in {where}", "store the plan first"
            )


def add_run(
    connection: Connection, *, machine: Machine, fingerprint: Fingerprint, values: dict[str, Any]
) -> int:
    """Append a run, and its machine where that is new, and return the run's id."""
    described = rows.machine_values(machine, fingerprint)
    insert_missing(connection, machines, described)
    query = select(machines.c.id).where(machines.c.fingerprint == described["fingerprint"])
    row = {
        **values,
        "machine_id": connection.execute(query).scalar_one(),
        "software": dict(fingerprint.software),
        "created_at": rows.utc_now(),
    }
    return int(connection.execute(insert(runs).values(row).returning(runs.c.id)).scalar_one())


def latest_open_run(connection: Connection, name: str, fingerprint: Fingerprint) -> int | None:
    """Return the latest unfinished run of that name; None where it had another fingerprint."""
    query = (
        select(runs.c.id, runs.c.software)
        .join(machines)
        .where(
            runs.c.name == name,
            runs.c.provenance == "measured",
            runs.c.status != "complete",
            machines.c.hardware_id == fingerprint.hardware_id,
        )
        .order_by(runs.c.id.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    if row is None or row.software != dict(fingerprint.software):
        return None
    return int(row.id)


def import_run(connection: Connection, profile: Profile) -> int:
    """Append an imported profile's samples as a complete run and return its id."""
    run_id = add_run(
        connection,
        machine=profile.machine,
        fingerprint=profile.fingerprint,
        values={
            "name": profile.name,
            "provenance": profile.provenance,
            "preset": "",
            "status": "complete",
        },
    )
    add_samples(connection, run_id, profile.samples)
    return run_id


def add_samples(connection: Connection, run_id: int, measured: Sequence[Sample]) -> None:
    """Append samples to the run."""
    if measured:
        values = [rows.sample_values(sample, run_id) for sample in measured]
        connection.execute(insert(samples), values)


def add_fit(connection: Connection, profile: Profile, run_id: int | None, where: str) -> None:
    """Append a profile, fitted to the run or, without one, imported as a run of its own.

    Args:
        where: the store's place for an error.

    Raises:
        InputError: there is no such run, or the profile's samples are others than its.
    """
    if run_id is None:
        run_id = import_run(connection, profile)
    else:
        require_run(connection, run_id)
        if profile.samples not in ((), samples_of(connection, run_id, where)):
            raise InputError(
                f"profile {profile.name!r} has other samples than run {run_id}",
                "add them to the run first",
            )
    last = select(func.max(samples.c.id)).where(samples.c.run_id == run_id)
    values = {
        "run_id": run_id,
        "name": profile.name,
        "document": rows.profile_document(profile),
        "last_sample_id": connection.execute(last).scalar() or 0,
        "created_at": rows.utc_now(),
    }
    connection.execute(insert(fits).values(values))


def current_profile(connection: Connection, name: str, where: str) -> Profile | None:
    """Return the newest profile of that name, with its samples.

    Args:
        where: the store's place for an error.
    """
    query = select(fits).where(fits.c.name == name).order_by(fits.c.id.desc()).limit(1)
    fit = connection.execute(query).mappings().first()
    if fit is None:
        return None
    measured = samples_of(connection, fit["run_id"], where, last_id=fit["last_sample_id"])
    return rows.profile_from_parts(fit["document"], measured, f"{where}: profile {name!r}")


def keep_plan(connection: Connection, plan: Plan) -> None:
    """Append the plan, or put it in the place of another answer to the same inputs."""
    values = rows.plan_values(plan)
    insert_missing(connection, plans, values)
    mine = plans.c.id == plan.id
    stored = connection.execute(select(plans.c.document).where(mine)).scalar_one()
    if canonical_json(stored) != canonical_json(plan):
        connection.execute(update(plans).where(mine).values(values))


def samples_of(
    connection: Connection, run_id: int, where: str, *, last_id: int | None = None
) -> tuple[Sample, ...]:
    """Return the run's samples in the order they were measured.

    Args:
        where: the store's place for an error.
        last_id: of the last sample to return; None for all.
    """
    query = select(samples).where(samples.c.run_id == run_id).order_by(samples.c.id)
    if last_id is not None:
        query = query.where(samples.c.id <= last_id)
    return tuple(rows.sample_from_row(row, where) for row in connection.execute(query).mappings())


def insert_missing(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Append the row unless one with its key is there."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).values(values).on_conflict_do_nothing())


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
) -> tuple[Stored[Observation], ...]:
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
