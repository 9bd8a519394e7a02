"""Routes of observed steps: store them, list them, and name the operations that changed."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from moetune.app.drift import DRIFT_SCHEMA, observed_drifts
from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.records import MAX_OBSERVATIONS, OBSERVATIONS_SCHEMA, Observation, Stored
from moetune.service import describe
from moetune.service.bodies import document, page, read_document
from moetune.service.describe import Limit, PlanCursor, RowCursor
from moetune.service.workers import WorkerPools

MOST_OBSERVATIONS = 2000
"""Newest observations in which changes are looked for."""
_MAX_SECONDS = 10_000
_MAX_SOURCE_CHARACTERS = 64


def add_observations(app: FastAPI, pools: WorkerPools) -> None:
    """Add the routes of observations, and of the changes among them."""
    _add_drift(app, pools)

    @app.post(
        "/v1/observations",
        summary="Store measured steps",
        status_code=HTTPStatus.CREATED,
        openapi_extra=describe.json_body(describe.Observations),
    )
    async def store_observations(request: Request) -> Response:
        """Store 1 to 1,000 observations of stored plans, all or none."""
        body = await read_document(request, pools, schema=OBSERVATIONS_SCHEMA)
        found = await pools.read(observations_in, body)
        await pools.may_add(request, "observations", len(found))
        await pools.write(pools.planner.store.add_observations, found)
        pools.metrics.observed(found)
        return document(
            {"schema": "moetune.observations.kept/1", "num_observations": len(found)},
            status=HTTPStatus.CREATED,
        )

    @app.get(
        "/v1/observations",
        summary="Measured steps",
        response_model=describe.PageDocument,
    )
    async def observations(
        plan: PlanCursor = "", after: RowCursor = 0, limit: Limit = 200
    ) -> Response:
        """List the observations of all plans, or of one, newest first."""
        rows = await pools.read(
            pools.planner.reading.observation_page, plan or None, after=after, limit=limit + 1
        )
        items = tuple(_row(row) for row in rows)
        return page("moetune.observations.page/1", items, limit=limit, cursor=lambda row: row["id"])


def _add_drift(app: FastAPI, pools: WorkerPools) -> None:
    """Add the route of changed operations."""

    @app.get(
        "/v1/drift",
        summary="Operations whose time changed",
    )
    async def drift(plan: PlanCursor = "") -> Response:
        """List the changes among the newest observations of all plans, or of one."""
        rows = await pools.read(
            pools.planner.reading.observation_page, plan or None, limit=MOST_OBSERVATIONS
        )
        found = await pools.read(observed_drifts, rows)
        items = [{**encode(one), "words": one.words} for one in found]
        return document({"schema": DRIFT_SCHEMA, "items": items})


def observations_in(body: dict[str, object]) -> tuple[Observation, ...]:
    """Return the observations in a body.

    Raises:
        InputError: none or too many of them, an unknown or missing key, or a value of the wrong
            type or out of range; the message names its place.
    """
    rows = body.pop("observations", None)
    if body:
        raise InputError(f"the body has the unknown key {shown(next(iter(body)))}")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_OBSERVATIONS:
        raise InputError(f"observations must be a list of 1 to {MAX_OBSERVATIONS:,} entries")
    return tuple(_observation(row, f"observations[{index}]") for index, row in enumerate(rows))


def _observation(plain: object, where: str) -> Observation:
    found = decode(Observation, plain, where)
    if len(found.seconds) > _MAX_SECONDS:
        raise InputError(f"{where}.seconds has more than {_MAX_SECONDS:,} entries")
    if not 0 < len(found.source) <= _MAX_SOURCE_CHARACTERS or not found.source.isprintable():
        raise InputError(
            f"{where}.source must have 1 to {_MAX_SOURCE_CHARACTERS} printable characters"
        )
    return found


def _row(row: Stored[Observation]) -> dict[str, object]:
    return {"id": row.id, "created_at": row.created_at, **encode(row.value)}
