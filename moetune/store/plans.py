"""Plans, the steps observed under them, and the sizes that online searches settled."""

import re
from collections.abc import Sequence

from sqlalchemy import (
    Connection,
    Text,
    and_,
    bindparam,
    cast,
    insert,
    select,
    tuple_,
    update,
)

from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.records import Observation, PlanInfo, Settled, Stored
from moetune.domain.storable import check_observation, check_plan, check_settled
from moetune.store import rows
from moetune.store.base import DatabaseStore, insert_missing
from moetune.store.schema import observations as observed
from moetune.store.schema import plans, settled_sizes

_PREFIX = re.compile(r"[0-9a-f]{1,64}")
_DOCUMENT = select(cast(plans.c.document, Text)).where(plans.c.id == bindparam("plan_id"))
_DOCUMENTS = select(plans.c.id, cast(plans.c.document, Text)).where(
    plans.c.id.in_(bindparam("plan_ids", expanding=True))
)


class PlanStore(DatabaseStore):
    """Plans, observations and settled sizes."""

    def save_plan(self, plan: AnyPlan) -> None:
        """Append the plan; one of the same inputs by an older moetune gives way to it.

        Observations keep the prediction of the plan under which they were made.

        Raises:
            InputError: it predicts a time that no step takes (`moetune.domain.storable`).
        """
        check_plan(plan)
        values = rows.plan_values(plan)
        mine = plans.c.id == plan.id

        def work(connection: Connection) -> None:
            insert_missing(connection, plans, values)
            stored = connection.execute(select(plans.c.document).where(mine)).scalar_one()
            if canonical_json(stored) != canonical_json(values["document"]):
                connection.execute(update(plans).where(mine).values(values))

        self._database.write(work)

    def plan(self, plan_id: str) -> AnyPlan | None:
        """Return the plan whose id starts so.

        Raises:
            InputError: several plans' ids start so.
        """
        if not _PREFIX.fullmatch(plan_id):
            return None
        # Not LIKE, which no index answers; "g" follows the last digit.
        mine = and_(plans.c.id >= plan_id, plans.c.id < f"{plan_id}g")
        found = self._rows(select(plans).where(mine).order_by(plans.c.id).limit(5))
        if len(found) > 1:
            names = ", ".join(row["id"][: len(plan_id) + 8] for row in found)
            raise InputError(f"plan id {plan_id!r} is ambiguous", f"give more of it: {names}")
        return rows.plan_from_row(found[0], self.location) if found else None

    def plan_document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan with exactly this id, as it is stored."""
        wanted = {"plan_id": plan_id}
        found: str | None = self._database.read(
            lambda connection: connection.execute(_DOCUMENT, wanted).scalar()
        )
        return found

    def plan_documents(self, plan_ids: Sequence[str]) -> dict[str, str]:
        """Return the canonical JSON of the plans with exactly these ids, those that are stored."""
        wanted = {"plan_ids": list(plan_ids)}
        found = self._database.read(lambda connection: connection.execute(_DOCUMENTS, wanted).all())
        return {row[0]: row[1] for row in found}

    def plans(self) -> tuple[PlanInfo, ...]:
        """Return every plan, newest first."""
        return self._database.read(_plan_infos)

    def plan_page(self, *, after: str = "", limit: int = 50) -> tuple[PlanInfo, ...]:
        """Return a page of the plans, newest first; NotFoundError without a plan `after`."""
        return self._database.read(
            lambda connection: _plan_infos(connection, after=after, limit=limit)
        )

    def add_observation(self, observation: Observation) -> None:
        """Append one observation."""
        self.add_observations((observation,))

    def add_observations(self, observations: Sequence[Observation]) -> None:
        """Append observations, all or none; InputError names the first that cannot be stored."""
        for one in observations:
            check_observation(one)
        values = [rows.observation_values(one) for one in observations]

        def work(connection: Connection) -> None:
            _require_plans(connection, [one.plan_id for one in observations], self.location)
            connection.execute(insert(observed), values)

        if values:
            self._database.write(work)

    def observation_page(
        self, plan_id: str | None, *, after: int = 0, limit: int = 200
    ) -> tuple[Stored[Observation], ...]:
        """Return a page of the observations of a plan, or of all for None, newest first."""
        query = select(observed)
        if plan_id is not None:
            query = query.where(observed.c.plan_id == plan_id)
        found = self._page(query, observed.c.id, after=after, limit=limit)
        return tuple(map(rows.stored_observation, found))

    def observations(self, plan_id: str) -> tuple[Observation, ...]:
        """Return the plan's observations, oldest first."""
        query = select(observed).where(observed.c.plan_id == plan_id).order_by(observed.c.id)
        return tuple(rows.stored_observation(row).value for row in self._rows(query))

    def add_settled(self, settled: Settled) -> None:
        """Append a search's decision; earlier decisions for the same size are not replaced."""
        check_settled(settled)

        def work(connection: Connection) -> None:
            _require_plans(connection, (settled.plan_id,), self.location)
            connection.execute(insert(settled_sizes).values(rows.settled_values(settled)))

        self._database.write(work)

    def settled(self, plan_id: str) -> tuple[Settled, ...]:
        """Return the decisions of searches that began with the plan, oldest first."""
        mine = settled_sizes.c.plan_id == plan_id
        query = select(settled_sizes).where(mine).order_by(settled_sizes.c.id)
        return tuple(rows.settled_from_row(row, self.location) for row in self._rows(query))


def _require_plans(connection: Connection, plan_ids: Sequence[str], where: str) -> None:
    """Raise InputError, which names the first one, unless all of the plans are stored."""
    wanted = tuple(dict.fromkeys(plan_ids))
    known = set(connection.execute(select(plans.c.id).where(plans.c.id.in_(wanted))).scalars())
    for plan_id in wanted:
        if plan_id not in known:
            raise InputError(
                f"there is no plan {plan_id[:12]!r} in {where}", "store the plan first"
            )


def _plan_infos(
    connection: Connection, *, after: str = "", limit: int | None = None
) -> tuple[PlanInfo, ...]:
    """Return the plans that follow `after`, newest first; all of them without a limit."""
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
        query = query.where(tuple_(plans.c.created_at, plans.c.id) < tuple_(*seen))
    return rows.infos(PlanInfo, connection.execute(query).mappings())
