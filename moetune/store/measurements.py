"""Measuring runs, their samples, and the profiles fitted to them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection, delete, func, insert, select, update

from moetune.domain.cluster import Cluster, Fingerprint
from moetune.domain.document import digest, encode
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.records import RunInfo, RunStatus
from moetune.domain.samples import Sample
from moetune.store import rows, storable
from moetune.store.database import Database, insert_missing, reads, writes
from moetune.store.schema import fits, machines, runs, samples


class MeasurementStore(Database):
    """Runs, samples, machines and profiles."""

    @writes
    def start_run(self, connection: Connection, *, name: str, cluster: Cluster, preset: str) -> int:
        """Append a running measurement under that profile name and return its id."""
        return _add_run(
            connection, cluster, name=name, provenance="measured", preset=preset, status="running"
        )

    @reads
    def open_run(
        self, connection: Connection, *, name: str, fingerprint: Fingerprint
    ) -> int | None:
        """Return the latest unfinished run of that name on this hardware, to resume it.

        Return None if there is no such run, or if it ran with other software: its samples do not
        describe this machine as it is now.
        """
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
        run = connection.execute(query).first()
        return int(run.id) if run and run.software == dict(fingerprint.software) else None

    @writes
    def add_samples(self, connection: Connection, run_id: int, samples: Sequence[Sample]) -> None:
        """Append all samples to the run, or none; raise InputError for an impossible time."""
        for sample in samples:
            storable.check(sample)
        _require_run(connection, run_id)
        _add_samples(connection, run_id, samples)

    @reads
    def samples(self, connection: Connection, run_id: int) -> tuple[Sample, ...]:
        """Return the run's samples in the order they were measured."""
        return self._samples(connection, run_id)

    @writes
    def finish_run(self, connection: Connection, run_id: int, *, status: RunStatus) -> None:
        """Close the run."""
        _require_run(connection, run_id)
        connection.execute(update(runs).where(runs.c.id == run_id).values(status=status))

    @writes
    def save_profile(
        self, connection: Connection, profile: Profile, *, run_id: int | None = None
    ) -> None:
        """Append a profile that is fitted to the run's samples so far, or imported with samples.

        The newest profile of a name is the current profile.

        Raises:
            InputError: it has times or rates that no machine has (`moetune.store.storable`), or
                was fitted to other samples than the run has.
        """
        storable.check(profile)
        fitted_to = _import_run(connection, profile) if run_id is None else run_id
        if run_id is not None and profile.samples not in ((), self._samples(connection, run_id)):
            raise InputError(
                f"profile {profile.name!r} has other samples than run {run_id}",
                "add them to the run first",
            )
        last = select(func.max(samples.c.id)).where(samples.c.run_id == fitted_to)
        values = {
            "run_id": fitted_to,
            "name": profile.name,
            "document": encode(replace(profile, samples=())),
            "last_sample_id": connection.scalar(last) or 0,
        }
        del values["document"]["samples"]
        connection.execute(insert(fits).values(rows.columns(values)))

    @reads
    def profile(self, connection: Connection, name: str) -> Profile | None:
        """Return the current profile of that name, with its samples."""
        query = select(fits).where(fits.c.name == name).order_by(fits.c.id.desc())
        fit = connection.execute(query.limit(1)).first()
        if fit is None:
            return None
        measured = self._samples(connection, fit.run_id, last_id=fit.last_sample_id)
        where = f"{self.location}: profile {name!r}"
        profile = rows.read_row(partial(profile_from_document, fit.document), where)
        return replace(profile, samples=measured)

    @reads
    def current_fit(self, connection: Connection, name: str) -> int | None:
        """Return the id of the current profile's fit; None where no profile has that name."""
        query = select(func.max(fits.c.id)).where(fits.c.name == name)
        newest: int | None = connection.scalar(query)
        return newest

    @writes
    def remove_profile(self, connection: Connection, name: str) -> int:
        """Delete every run and fit of that name and return how many runs there were."""
        connection.execute(delete(fits).where(fits.c.name == name))
        return connection.execute(delete(runs).where(runs.c.name == name)).rowcount

    @reads
    def runs(self, connection: Connection) -> tuple[RunInfo, ...]:
        """Return every run, newest first."""
        names = ("id", "name", "provenance", "preset", "status", "created_at")
        count = select(func.count()).where(samples.c.run_id == runs.c.id).correlate(runs)
        query = select(
            *(runs.c[name] for name in names),
            machines.c.device,
            machines.c.num_devices,
            count.scalar_subquery().label("num_samples"),
        )
        query = query.join(machines).order_by(runs.c.id.desc())
        return rows.infos(RunInfo, connection.execute(query))

    def _samples(
        self, connection: Connection, run_id: int, *, last_id: int | None = None
    ) -> tuple[Sample, ...]:
        """Return the run's samples as measured, up to the sample `last_id`, or all."""
        _require_run(connection, run_id)
        query = select(samples).where(samples.c.run_id == run_id).order_by(samples.c.id)
        if last_id is not None:
            query = query.where(samples.c.id <= last_id)
        measured = connection.execute(query).mappings()
        return tuple(rows.sample_from_row(row, self.location) for row in measured)


def _add_run(connection: Connection, measured: Cluster | Profile, **values: str) -> int:
    """Append a run, and its machine if that is new; return the run's id."""
    machine, fingerprint = measured.machine, measured.fingerprint
    facts = encode(fingerprint.hardware)
    key = digest({"machine": encode(machine), "facts": facts})
    described = rows.columns(
        machine, fingerprint=key, hardware_id=fingerprint.hardware_id, facts=facts
    )
    insert_missing(connection, machines, described)
    query = select(machines.c.id).where(machines.c.fingerprint == key)
    machine_id = connection.execute(query).scalar_one()
    row = rows.columns(values, machine_id=machine_id, software=dict(fingerprint.software))
    return int(connection.execute(insert(runs).values(row).returning(runs.c.id)).scalar_one())


def _import_run(connection: Connection, profile: Profile) -> int:
    run_id = _add_run(
        connection, profile, name=profile.name, provenance=profile.provenance, preset="",
        status="complete",
    )  # fmt: skip
    _add_samples(connection, run_id, profile.samples)
    return run_id


def _add_samples(connection: Connection, run_id: int, measured: Sequence[Sample]) -> None:
    if measured:
        values = [
            {**encode(sample), "kind": sample.point.kind, "run_id": run_id} for sample in measured
        ]
        connection.execute(insert(samples), values)


def _require_run(connection: Connection, run_id: int) -> None:
    if connection.execute(select(runs.c.id).where(runs.c.id == run_id)).first() is None:
        raise InputError(f"there is no run {run_id}", "see `moetune profiles list`")
