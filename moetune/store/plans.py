"""Plans, and the sizes that online searches settled under them."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    RowMapping,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    select,
    tuple_,
    update,
)

from moetune.domain.any_plan import AnyPlan, plan_from_document
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.records import PlanInfo, Removed, Settled
from moetune.store import rows, storable
from moetune.store.database import (
    NOTHING_REMOVED,
    Database,
    first_missing,
    insert_missing,
    reads,
    writes,
)
from moetune.store.schema import plans, settled_sizes

_PREFIX = re.compile(r"[0-9a-f]{1,64}")
_DOCUMENTS = select(plans.c.id, cast(plans.c.document, Text)).where(
    plans.c.id.in_(bindparam("plan_ids", expanding=True))
)


class PlanStore(Database):
    """Plans and settled sizes."""

    @writes
    def save_plan(self, connection: Connection, plan: AnyPlan) -> None:
        """Append the plan; it replaces an older moetune's plan for the same inputs.

        Raises:
            InputError: it predicts a time that no step takes (`moetune.store.storable`).
        """
        storable.check(plan)
        names = ("model", "profile", "world_size", "tokens_per_rank")
        inputs = {name: getattr(plan.inputs, name) for name in names}
        values = rows.columns({"id": plan.id, **inputs, "document": encode(plan)})
        insert_missing(connection, plans, values)
        mine = plans.c.id == plan.id
        stored = connection.scalar(select(plans.c.document).where(mine))
        if canonical_json(stored) != canonical_json(values["document"]):
            connection.execute(update(plans).where(mine).values(values))

    @reads
    def plan(self, connection: Connection, plan_id: str) -> AnyPlan | None:
        """Return the plan whose id begins with `plan_id`; raise InputError if several do."""
        row = _beginning_with(connection, plan_id, *plans.c)
        if row is None:
            return None
        where = f"{self.location}: plan {row['id'][:12]}"
        return rows.read_row(partial(plan_from_document, row["document"]), where)

    @reads
    def plan_id(self, connection: Connection, plan_id: str) -> str:
        """Return the whole id of the plan whose id begins with `plan_id`; do not read the plan.

        Raises:
            NotFoundError, InputError: no plan's id begins with it, or several do.
        """
        row = _beginning_with(connection, plan_id, plans.c.id)
        if row is None:
            raise NotFoundError(
                f"no plan has an id that begins with {plan_id!r}", "see `moetune plans list`"
            )
        return str(row["id"])

    @reads
    def plan_documents(self, connection: Connection, plan_ids: Sequence[str]) -> dict[str, str]:
        """Return plans' canonical JSON by id; ids must be whole, and unknown ids are left out."""
        rows = connection.execute(_DOCUMENTS, {"plan_ids": list(plan_ids)})
        return {row[0]: row[1] for row in rows}

    @reads
    def plans(
        self,
        connection: Connection,
        *,
        model: str | None = None,
        profile: str | None = None,
        since: str = "",
        after: str = "",
        limit: int | None = None,
    ) -> tuple[PlanInfo, ...]:
        """Return plans, newest first; their documents are not read.

        Args:
            model: name of their model; None for every model and layer.
            profile: name of their profile; None for all.
            since: earliest time, UTC, ISO 8601; "" for any.
            after: id of the plan before the first of these; "" to begin with the newest.

        Raises:
            NotFoundError: there is no plan `after`.
        """
        named = [(plans.c.model, model), (plans.c.profile, profile)]
        query = select(*(plans.c[name] for name in PlanInfo.__dataclass_fields__)).where(
            plans.c.created_at >= since,
            *(column == wanted for column, wanted in named if wanted is not None),
        )
        place = plans.c.created_at, plans.c.id
        if after:
            last = connection.execute(select(*place).where(plans.c.id == after)).first()
            if last is None:
                raise NotFoundError(
                    f"there is no plan {after[:12]!r} to go on after", "begin with the first page"
                )
            query = query.where(tuple_(*place) < tuple_(*last))
        newest_first = query.order_by(*(column.desc() for column in place)).limit(limit)
        return rows.infos(PlanInfo, connection.execute(newest_first))

    @writes
    def add_settled(self, connection: Connection, settled: Settled) -> None:
        """Append a search's decision; earlier decisions for the same size are not replaced."""
        storable.check(settled)
        if first_missing(connection, plans.c.id, [settled.plan_id]) is not None:
            what = f"there is no plan {settled.plan_id[:12]!r} in {self.location}"
            raise InputError(what, "store the plan first")
        connection.execute(insert(settled_sizes).values(rows.settled_values(settled)))

    @reads
    def settled(self, connection: Connection, plan_id: str) -> tuple[Settled, ...]:
        """Return the decisions of searches that began with the plan, oldest first."""
        mine = settled_sizes.c.plan_id == plan_id
        stored = connection.execute(select(settled_sizes).where(mine).order_by(settled_sizes.c.id))
        return tuple(rows.settled_from_row(row, self.location) for row in stored.mappings())

    @writes
    def remove_plans(self, connection: Connection, plan_ids: Sequence[str]) -> Removed:
        """Delete plans with exactly these ids, and the sizes that were settled under them.

        Raises:
            NotFoundError: a plan is not stored; then none is deleted.
        """
        if (plan_id := first_missing(connection, plans.c.id, plan_ids)) is not None:
            raise NotFoundError(f"there is no plan {plan_id[:12]!r}", NOTHING_REMOVED)
        return _remove(connection, settled_sizes.c.plan_id.in_(plan_ids), plans.c.id.in_(plan_ids))

    def prune(self, before: str, *, dry_run: bool = False) -> Removed:
        """Delete older rows, except plans under which a size was settled later.

        Args:
            before: rows before this time are older; UTC, ISO 8601, as in `Stored`.
            dry_run: count only.
        """
        settled = settled_sizes.c
        later = exists().where(settled.plan_id == plans.c.id, settled.created_at >= before)
        old = settled.created_at < before, (plans.c.created_at < before) & ~later
        run = self.read if dry_run else self.write
        return run(lambda connection: _remove(connection, *old, dry_run=dry_run))


def _beginning_with(
    connection: Connection, plan_id: str, *columns: Column[Any]
) -> RowMapping | None:
    """Return columns of the plan whose id begins with `plan_id`; InputError if several do."""
    if not _PREFIX.fullmatch(plan_id):
        return None
    # Not LIKE, which no index answers; "g" follows the last digit.
    query = select(*columns).where(plans.c.id >= plan_id, plans.c.id < f"{plan_id}g")
    matches = connection.execute(query.order_by(plans.c.id).limit(5)).mappings().all()
    if len(matches) > 1:
        names = ", ".join(row["id"][: len(plan_id) + 8] for row in matches)
        raise InputError(f"plan id {plan_id!r} is ambiguous", f"give more of it: {names}")
    return matches[0] if matches else None


def _remove(
    connection: Connection,
    of_settled: ColumnElement[bool],
    of_plans: ColumnElement[bool],
    *,
    dry_run: bool = False,
) -> Removed:
    """Delete rows, or count them; plans come last, since settled sizes refer to them."""

    def remove_rows(table: Table, condition: ColumnElement[bool]) -> int:
        if dry_run:
            return connection.scalar(select(func.count()).select_from(table).where(condition)) or 0
        return connection.execute(delete(table).where(condition)).rowcount

    return Removed(
        settled=remove_rows(settled_sizes, of_settled),
        plans=remove_rows(plans, of_plans),
    )
