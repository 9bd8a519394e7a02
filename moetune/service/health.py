"""Addresses for who runs the service: is it alive, can it work, and how is it doing."""

from http import HTTPStatus

from anyio import move_on_after
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from moetune.service import describe
from moetune.service.answers import document
from moetune.service.guard import right_in
from moetune.service.metrics import CONTENT_TYPE
from moetune.service.office import Office
from moetune.service.problems import RETRY_AFTER_SECONDS

_PATIENCE_SECONDS = 3.0


def add_health(app: FastAPI, office: Office, *, version: str) -> None:
    """Add the addresses."""

    @app.get(
        "/healthz", summary="Is the process alive", responses=describe.answers(dict[str, object])
    )
    async def healthz() -> Response:
        """Answer without the database."""
        return document({"schema": "moetune.health/1", "status": "ok", "version": version})

    @app.get(
        "/readyz", summary="Can the database be used", responses=describe.answers(dict[str, object])
    )
    async def readyz(request: Request) -> Response:
        """Answer 200, or 503 with the reasons; these only for who may read."""
        found = await _problems(office)
        told = found if right_in(request.scope) != "none" else ()
        return document(
            {"schema": "moetune.ready/1", "ready": not found, "problems": told},
            status=HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)} if found else None,
        )

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        """Return the text exposition format."""
        return Response(
            await office.check(office.metrics.text), headers={"Content-Type": CONTENT_TYPE}
        )


async def _problems(office: Office) -> tuple[str, ...]:
    with move_on_after(_PATIENCE_SECONDS):
        return await office.check(office.desk.problems)
    return (f"the database does not answer within {_PATIENCE_SECONDS:.0f} s",)
