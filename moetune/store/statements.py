"""Statements that several methods of the store share. Each runs in its caller's transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from moetune.domain.errors import InputError
from moetune.domain.hardware import Fingerprint, Machine
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample
from moetune.store import rows
from moetune.store.schema import machines, plans, runs, samples


def require_run(connection: Connection, run_id: int) -> None:
    """Raise InputError unless there is such a run."""
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise InputError(f"there is no run {run_id}", "see `moetune profiles list`")


def require_plan(connection: Connection, plan_id: str, where: str) -> None:
    """Raise InputError unless the plan is stored."""
    if connection.execute(select(plans.c.id).where(plans.c.id == plan_id)).first() is None:
        raise InputError(f"there is no plan {plan_id[:12]!r} in {where}", "store the plan first")


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
