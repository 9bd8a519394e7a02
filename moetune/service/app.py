"""The FastAPI application: addresses of programs, pages, middleware, and error handlers."""

from collections.abc import Callable
from functools import cache, partial
from http import HTTPStatus
from importlib.metadata import version

from anyio import move_on_after
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from moetune.app.check import LaunchText
from moetune.app.plan import SentInputs
from moetune.app.planner import ServicePlanner
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.service import plans, profiles
from moetune.service.access import Access
from moetune.service.bodies import document
from moetune.service.describe import PROBLEMS, Address, PageDocument, openapi_of
from moetune.service.metrics import CONTENT_TYPE, Metrics
from moetune.service.middleware import AuthMiddleware, RequestMiddleware, right_in, wants_page
from moetune.service.pages.routes import add_pages
from moetune.service.problems import RETRY_AFTER_SECONDS, Problem, problem_of, problem_response
from moetune.service.workers import WorkerPools

_PATIENCE_SECONDS = 3.0


async def health(_: WorkerPools) -> Response:
    """Answer without the database."""
    return document({"schema": "moetune.health/1", "status": "ok", "version": version("moetune")})


async def readiness(pools: WorkerPools, request: Request) -> Response:
    """Answer 200, or 503 with the reasons, which only those who may read get."""
    problems: tuple[str, ...] = (f"the database does not answer within {_PATIENCE_SECONDS:.0f} s",)
    with move_on_after(_PATIENCE_SECONDS):
        problems = await pools.check(pools.planner.problems)
    shown = problems if right_in(request.scope) != "none" else ()
    return document(
        {"schema": "moetune.ready/1", "ready": not problems, "problems": shown},
        status=HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK,
        headers={"Retry-After": str(RETRY_AFTER_SECONDS)} if problems else None,
    )


async def metrics(pools: WorkerPools) -> Response:
    """Return the text exposition format."""
    return Response(await pools.check(pools.metrics.text), headers={"Content-Type": CONTENT_TYPE})


_ADDRESSES = (
    # The most frequent address comes first, as they are matched in order.
    Address("GET", "/v1/plans/{plan_id}", plans.stored_plan, "A stored plan", Plan),
    Address(
        "POST", "/v1/plans:resolve", plans.resolve, "The plan for these inputs", Plan, SentInputs,
    ),
    Address("GET", "/v1/plans/{plan_id}/trace", plans.trace, "A plan's predicted timeline"),
    Address(
        "POST", "/v1/whatif", plans.changed, "A plan for changed inputs or speeds", None,
        plans.ChangeDocument,
    ),
    Address(
        "POST", "/v1/check", plans.checked, "What a launch runs, and what would be better", None,
        LaunchText,
    ),
    Address("GET", "/v1/plans", plans.stored_plans, "Stored plans", PageDocument),
    Address("GET", "/v1/profiles", profiles.profiles, "Profiles", PageDocument),
    Address("GET", "/v1/profiles/{name}", profiles.profile, "A profile", Profile),
    Address(
        "POST", "/v1/profiles", profiles.add_profile, "Store a profile", None, Profile,
        HTTPStatus.CREATED,
    ),
    Address("GET", "/v1/runs", profiles.runs, "Observed runs of models", PageDocument),
    Address("GET", "/healthz", health, "Is the process alive"),
    Address("GET", "/readyz", readiness, "Can the database be used"),
    Address("GET", "/metrics", metrics, "Metrics for Prometheus"),
)  # fmt: skip


def create_app(planner: ServicePlanner, access: Access) -> FastAPI:
    """Return the application that answers from a planner the requests that `access` accepts."""
    # FastAPI's documentation pages load scripts of other hosts; its telemetry is not wanted.
    app = FastAPI(
        title="moetune",
        version=version("moetune"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEMS,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    pools = WorkerPools(planner=planner, metrics=Metrics(planner))
    for address in _ADDRESSES:
        address.add(app, pools)
    renderer = add_pages(app, pools, access)

    def refused(scope: Scope, problem: Problem) -> Response:
        return renderer.problem(problem) if wants_page(scope) else problem_response(problem)

    app.add_middleware(AuthMiddleware, access=access, refused=refused)
    app.add_middleware(RequestMiddleware, metrics=pools.metrics)
    app.openapi = cache(partial(openapi_of, app, _ADDRESSES))  # type: ignore[method-assign]
    _add_problems(app, refused)
    return app


def _add_problems(app: FastAPI, refused: Callable[[Scope, Problem], Response]) -> None:
    @app.exception_handler(MoetuneError)
    async def moetune_error(request: Request, error: MoetuneError) -> Response:
        return refused(request.scope, problem_of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        status, path = HTTPStatus(error.status_code), request.url.path
        details = {
            HTTPStatus.NOT_FOUND: f"{path} does not exist",
            HTTPStatus.METHOD_NOT_ALLOWED: f"{path} does not support {request.method}",
        }
        is_lost = status == HTTPStatus.NOT_FOUND and not wants_page(request.scope)
        problem = Problem(
            status=status,
            title=status.phrase.lower(),
            detail=details.get(status, error.detail),
            code=InputError.exit_code,
            hint="GET /openapi.json describes every address" if is_lost else "",
            headers=error.headers or {},
        )
        return refused(request.scope, problem)

    @app.exception_handler(RequestValidationError)
    async def wrong_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        problem = problem_of(InputError(f"{first['loc'][-1]}: {first['msg']}"))
        return refused(request.scope, problem)
