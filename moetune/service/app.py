"""The FastAPI application: routes, middleware, error handlers, and the health endpoints."""

from dataclasses import replace
from http import HTTPStatus
from importlib.metadata import version

from anyio import move_on_after
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import InputError, MoetuneError
from moetune.service.access import Access
from moetune.service.bodies import document
from moetune.service.describe import PROBLEMS, openapi_of
from moetune.service.login import add_login
from moetune.service.metrics import CONTENT_TYPE
from moetune.service.middleware import AuthMiddleware, RequestMiddleware, right_in, wants_page
from moetune.service.observations import add_observations
from moetune.service.pages.page import PageRenderer
from moetune.service.pages.routes import add_pages
from moetune.service.plans import add_plans
from moetune.service.problems import RETRY_AFTER_SECONDS, http_problem, problem_of, problem_response
from moetune.service.profiles import add_profiles
from moetune.service.quotas import QuotaLimits
from moetune.service.workers import WorkerPools

_PATIENCE_SECONDS = 3.0


def add_health(app: FastAPI, pools: WorkerPools, *, version: str) -> None:
    """Add the routes of health, readiness and metrics."""

    @app.get(
        "/healthz",
        summary="Is the process alive",
    )
    async def healthz() -> Response:
        """Answer without the database."""
        return document({"schema": "moetune.health/1", "status": "ok", "version": version})

    @app.get(
        "/readyz",
        summary="Can the database be used",
    )
    async def readyz(request: Request) -> Response:
        """Answer 200, or 503 with the reasons, which only those who may read get."""
        found = await _problems(pools)
        shown = found if right_in(request.scope) != "none" else ()
        return document(
            {"schema": "moetune.ready/1", "ready": not found, "problems": shown},
            status=HTTPStatus.SERVICE_UNAVAILABLE if found else HTTPStatus.OK,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)} if found else None,
        )

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def metrics() -> Response:
        """Return the text exposition format."""
        return Response(
            await pools.check(pools.metrics.text), headers={"Content-Type": CONTENT_TYPE}
        )


async def _problems(pools: WorkerPools) -> tuple[str, ...]:
    with move_on_after(_PATIENCE_SECONDS):
        return await pools.check(pools.planner.problems)
    return (f"the database does not answer within {_PATIENCE_SECONDS:.0f} s",)


def create_app(
    planner: ServicePlanner, access: Access, limits: QuotaLimits | None = None
) -> FastAPI:
    """Return the application over a planner, for requests that `access` lets in.

    Args:
        limits: of what clients add; None for those of `QuotaLimits`.
    """
    own_version = version("moetune")
    # FastAPI's documentation pages load scripts of other hosts; its telemetry is not wanted.
    app = FastAPI(
        title="moetune",
        version=own_version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEMS,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    pools = WorkerPools.of(planner, limits)
    add_plans(app, pools)
    add_profiles(app, pools)
    add_observations(app, pools)
    add_health(app, pools, version=own_version)
    renderer = add_pages(app, pools, access)
    add_login(app, access, renderer)
    app.add_middleware(AuthMiddleware, access=access, page=renderer.problem)
    app.add_middleware(RequestMiddleware, metrics=pools.metrics)
    _add_openapi(app, own_version)
    _add_problems(app, renderer)
    return app


def _add_openapi(app: FastAPI, own_version: str) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Built by the first request for it, so that the start is quick.
        if app.openapi_schema is None:
            app.openapi_schema = openapi_of(app, version=own_version)
        return JSONResponse(app.openapi_schema)


def _add_problems(app: FastAPI, renderer: PageRenderer) -> None:
    """Answer every error with a problem document, and a browser at no address with a page."""

    @app.exception_handler(MoetuneError)
    async def moetune_error(_: Request, error: MoetuneError) -> Response:
        return problem_response(problem_of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"{request.url.path} does not exist"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} does not support {request.method}"
        problem = http_problem(error.status_code, detail, error.headers)
        if wants_page(request.url.path, request.headers.get("accept", "")):
            return renderer.problem(replace(problem, hint=""))
        return problem_response(problem)

    @app.exception_handler(RequestValidationError)
    async def wrong_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = first["loc"][-1]
        return problem_response(problem_of(InputError(f"{name}: {first['msg']}")))
