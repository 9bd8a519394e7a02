"""Conversion of domain values to rows of the database and back."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import CursorResult, RowMapping

from moetune.domain.any_plan import AnyPlan, plan_from_document
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.document import decode, digest, encode
from moetune.domain.errors import BadStoreError, InputError
from moetune.domain.operations import Operation, OperationTimes
from moetune.domain.profile import Profile, profile_from_document
from moetune.domain.records import Observation, Settled, Stored
from moetune.domain.samples import Sample

T = TypeVar("T")
Values = dict[str, Any]
_DECIDED = ("forward_degree", "backward_degree", "strategy")


def utc_now() -> str:
    """Return the time of day, UTC, as ISO 8601 text of constant width."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def machine_values(machine: Machine, fingerprint: Fingerprint) -> Values:
    """Return the columns of a machine."""
    sizes = encode(machine)
    facts = encode(fingerprint.hardware)
    return {
        **sizes,
        "fingerprint": digest({"machine": sizes, "facts": facts}),
        "hardware_id": fingerprint.hardware_id,
        "facts": facts,
        "created_at": utc_now(),
    }


def sample_values(sample: Sample, run_id: int) -> Values:
    """Return the columns of a sample."""
    return {**encode(sample), "kind": sample.point.kind, "run_id": run_id}


def sample_from_row(row: RowMapping, where: str) -> Sample:
    """Return the sample in a row.

    Raises:
        InputError: the row was changed by another program.
    """
    names = ("point", "seconds", "num_iterations", "marks", "error")
    return decode(Sample, {name: row[name] for name in names}, f"{where}: sample {row['id']}")


def profile_document(profile: Profile) -> Values:
    """Return the document of a fit: the profile without its samples."""
    document: Values = encode(replace(profile, samples=()))
    del document["samples"]
    return document


def profile_from_parts(document: object, samples: tuple[Sample, ...], where: str) -> Profile:
    """Return the profile in a fit's document and its run's samples.

    Raises:
        InputError: the document was written by another moetune or program.
    """
    try:
        return replace(profile_from_document(document), samples=samples)
    except InputError as error:
        raise BadStoreError(f"{where}: {error.what}", error.hint) from None


def plan_values(plan: AnyPlan) -> Values:
    """Return the columns of a plan."""
    return {
        "id": plan.id,
        "model": plan.inputs.model,
        "profile": plan.inputs.profile,
        "world_size": plan.inputs.world_size,
        "tokens_per_rank": plan.inputs.tokens_per_rank,
        "document": encode(plan),
        "created_at": utc_now(),
    }


def plan_from_row(row: RowMapping, where: str) -> AnyPlan:
    """Return the plan in a row.

    Raises:
        BadStoreError: the document was written by another moetune or program.
    """
    try:
        return plan_from_document(row["document"], f"{where}: plan {row['id'][:12]}")
    except InputError as error:
        raise BadStoreError(error.what, error.hint) from None


def infos(kind: type[T], result: CursorResult[Any]) -> tuple[T, ...]:
    """Return the list entries in rows, whose columns are the fields of their kind."""
    return tuple(decode(kind, dict(row), kind.__name__) for row in result.mappings())


def observation_values(observation: Observation) -> Values:
    """Return the columns of an observation."""
    return {
        **encode(observation),
        "strategy": observation.strategy,  # also where it is None
        "created_at": utc_now(),
    }


def stored_observation(row: RowMapping) -> Stored[Observation]:
    """Return an observation with its number and its time.

    Without `decode`, which would take a page's whole time for ten thousand of them.

    Raises:
        InputError: the row was changed by another program.
    """
    values = dict(row)
    number, created_at = values.pop("id"), values.pop("created_at")
    try:
        operations = tuple(map(_operation_times, values["operations"]))
        tuples = {"seconds": tuple(values["seconds"]), "operations": operations}
        value = Observation(**{**values, **tuples})
    except (TypeError, InputError):
        value = decode(Observation, values, f"observation {number}")
    return Stored(id=number, created_at=created_at, value=value)


def _operation_times(values: Values) -> OperationTimes:
    operation = Operation(**values["operation"])
    return OperationTimes(**{**values, "operation": operation, "seconds": tuple(values["seconds"])})


def settled_values(settled: Settled) -> Values:
    """Return the columns of a search's decision."""
    values: Values = encode(settled)
    decision: Values = values.pop("decision")
    decision["issue_order"] = decision.pop("order")
    median_seconds = settled.median_seconds
    return {**values, **decision, "median_seconds": median_seconds, "created_at": utc_now()}


def settled_from_row(row: RowMapping, where: str) -> Settled:
    """Return the search's decision in a row.

    Raises:
        InputError: the row was changed by another program.
    """
    values = dict(row)
    number = values.pop("id")
    for derived in ("median_seconds", "created_at"):
        del values[derived]
    values["decision"] = {
        "order": values.pop("issue_order"),
        **{name: values.pop(name) for name in _DECIDED},
    }
    return decode(Settled, values, f"{where}: settled size {number}")
