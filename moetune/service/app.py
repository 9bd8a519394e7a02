"""The application: the addresses, and what stands around them."""

from http import HTTPStatus
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moetune.domain.errors import InputError, MoetuneError
from moetune.service import pages
from moetune.service.access import Access
from moetune.service.describe import openapi_of
from moetune.service.front import Front
from moetune.service.guard import Guard
from moetune.service.health import add_health
from moetune.service.login import add_login
from moetune.service.metrics import Metrics
from moetune.service.observations import add_observations
from moetune.service.office import Office
from moetune.service.plans import add_plans
from moetune.service.problems import http_problem, problem_of, problem_response
from moetune.service.profiles import add_profiles
from moetune.workflows.desk import Desk


def create_app(desk: Desk, access: Access) -> FastAPI:
    """Return the application that answers from the desk, to those whom `access` lets in."""
    own_version = version("moetune")
    # Its own documentation page fetches scripts from elsewhere; its telemetry is not wanted.
    app = FastAPI(
        title="moetune",
        version=own_version,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    metrics = Metrics(desk)
    app.add_middleware(Guard, access=access)
    app.add_middleware(Front, metrics=metrics)
    office = Office(desk=desk, metrics=metrics)
    add_plans(app, office)
    add_profiles(app, office)
    add_observations(app, office)
    add_health(app, office, version=own_version)
    add_login(app, access)
    pages.mount(app, desk)
    _add_openapi(app, own_version)
    _add_problems(app)
    return app


def _add_openapi(app: FastAPI, own_version: str) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # Made when it is first asked for: the start need not wait for it.
        if app.openapi_schema is None:
            app.openapi_schema = openapi_of(app, version=own_version)
        return JSONResponse(app.openapi_schema)


def _add_problems(app: FastAPI) -> None:
    """Answer every error with a problem document."""

    @app.exception_handler(MoetuneError)
    async def moetune_error(_: Request, error: MoetuneError) -> Response:
        return problem_response(problem_of(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"there is nothing at {request.url.path}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} does not take {request.method}"
        return problem_response(http_problem(error.status_code, detail, error.headers))

    @app.exception_handler(RequestValidationError)
    async def wrong_query(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = first["loc"][-1]
        return problem_response(problem_of(InputError(f"{name}: {first['msg']}")))
