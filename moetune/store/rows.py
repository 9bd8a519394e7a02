"""Conversion of domain values to rows of the database and back."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import CursorResult, RowMapping

from moetune.domain.document import decode, encode
from moetune.domain.errors import BadStoreError, InputError
from moetune.domain.records import Settled, Stored
from moetune.domain.samples import Sample

T = TypeVar("T")
Values = dict[str, Any]
_DECIDED = ("forward_degree", "backward_degree", "strategy")


def utc_now() -> str:
    """Return the time of day, UTC, as ISO 8601 text of constant width."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def columns(value: object, **more: object) -> Values:
    """Return a row's columns: the keys of a value, `more` columns, and the time."""
    return {**encode(value), **more, "created_at": utc_now()}


def read_row(read: Callable[[], T], where: str) -> T:
    """Return what `read` returns; raise BadStoreError for a row that this moetune cannot read."""
    try:
        return read()
    except InputError as error:
        raise BadStoreError(f"{where}: {error.what}", error.hint) from None


def infos(kind: type[T], result: CursorResult[Any]) -> tuple[T, ...]:
    """Return rows as values of a kind, whose fields are the rows' columns."""
    return tuple(decode(kind, dict(row), kind.__name__) for row in result.mappings())


def sample_from_row(row: RowMapping, where: str) -> Sample:
    """Return the sample in a row; raise InputError if another program changed it."""
    values = {name: row[name] for name in Sample.__dataclass_fields__}
    return decode(Sample, values, f"{where}: sample {row['id']}")


def stored(kind: type[T], row: RowMapping, where: str) -> Stored[T]:
    """Return a row's value with its id and time; raise InputError for a changed row."""
    values = dict(row)
    number, created_at = values.pop("id"), values.pop("created_at")
    value = decode(kind, values, f"{where} {number}")
    return Stored(id=number, created_at=created_at, value=value)


def settled_values(settled: Settled) -> Values:
    """Return the columns of a search's decision."""
    values = columns(settled, median_seconds=settled.median_seconds)
    decision: Values = values.pop("decision")
    values["issue_order"] = decision.pop("order")
    return values | decision


def settled_from_row(row: RowMapping, where: str) -> Settled:
    """Return the search's decision in a row; raise as `stored` does."""
    values = dict(row)
    number = values.pop("id")
    for derived in ("median_seconds", "created_at"):
        del values[derived]
    values["decision"] = {
        "order": values.pop("issue_order"),
        **{name: values.pop(name) for name in _DECIDED},
    }
    return decode(Settled, values, f"{where}: settled size {number}")
