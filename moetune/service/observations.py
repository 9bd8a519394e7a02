"""Addresses of measured steps: training jobs send them, the page draws them."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from moetune.domain.document import decode, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.records import Kept, Observation
from moetune.service import describe
from moetune.service.answers import document, page
from moetune.service.bodies import read_document
from moetune.service.describe import Limit, PlanCursor, RowCursor
from moetune.service.office import Office

OBSERVATIONS_SCHEMA = "moetune.observations/1"
MAX_OBSERVATIONS = 1000
_MAX_SECONDS = 10_000
_MAX_SOURCE_CHARACTERS = 64


def add_observations(app: FastAPI, office: Office) -> None:
    """Add the addresses."""

    @app.post(
        "/v1/observations",
        summary="Keep measured steps",
        status_code=HTTPStatus.CREATED,
        responses=describe.answers(dict[str, object], HTTPStatus.CREATED, takes_body=True),
        openapi_extra=describe.json_body(describe.Observations),
    )
    async def keep(request: Request) -> Response:
        """Store 1 to 1,000 observations of stored plans, all or none."""
        body = await read_document(request, office, schema=OBSERVATIONS_SCHEMA)
        found = await office.read(observations_in, body)
        await office.write(office.desk.store.add_observations, found)
        office.metrics.observed(found)
        return document(
            {"schema": "moetune.observations.kept/1", "num_observations": len(found)},
            status=HTTPStatus.CREATED,
        )

    @app.get(
        "/v1/observations", summary="Measured steps", responses=describe.answers(describe.Page)
    )
    async def observations(
        plan: PlanCursor = "", after: RowCursor = 0, limit: Limit = 200
    ) -> Response:
        """List the observations of all plans, or of one, newest first."""
        rows = await office.read(
            office.desk.reading.observation_page, plan or None, after=after, limit=limit + 1
        )
        items = tuple(_row(row) for row in rows)
        return page("moetune.observations.page/1", items, limit=limit, cursor=lambda row: row["id"])


def observations_in(body: dict[str, object]) -> tuple[Observation, ...]:
    """Return the observations in a body.

    Raises:
        InputError: none or too many of them, an unknown or missing key, or a value of the wrong
            type or out of range; the text names the place.
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


def _row(kept: Kept[Observation]) -> dict[str, object]:
    return {"id": kept.id, "created_at": kept.created_at, **encode(kept.value)}
