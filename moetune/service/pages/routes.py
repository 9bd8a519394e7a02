"""Routes of the pages: GETs that write nothing, and the POSTs of the forms and of the login."""

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.responses import RedirectResponse
from starlette.staticfiles import StaticFiles

from moetune.domain.errors import NotAuthorisedError
from moetune.report.svg import STATIC
from moetune.service.access import Access
from moetune.service.bodies import read_form
from moetune.service.middleware import COOKIE, LOGIN_PATH, LOGOUT_PATH
from moetune.service.pages.check import add_check
from moetune.service.pages.machines import machines_page, profile_page
from moetune.service.pages.new_plan import add_new_plan, new_plan_page
from moetune.service.pages.page import Page, PageRenderer
from moetune.service.pages.plans import compare_page, plan_page, plans_page
from moetune.service.problems import Problem, problem_of
from moetune.service.workers import WorkerPools

_PAGES: Mapping[str, Callable[..., Page]] = MappingProxyType(
    {
        "/plans/{plan_id}": plan_page,
        "/": plans_page,
        "/machines": machines_page,
        "/profiles/{name:path}": profile_page,
        "/compare": compare_page,
        "/new": new_plan_page,
    }
)
"""Pages by address; its parts and fields are the page's arguments after the planner."""


def add_pages(app: FastAPI, pools: WorkerPools, access: Access) -> PageRenderer:
    """Add the pages and their static files to the application; return the pages' renderer.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    planner = pools.planner
    renderer = PageRenderer(location=planner.reading.location)
    app.mount("/static", StaticFiles(directory=STATIC))
    router = APIRouter(include_in_schema=False)
    for path, page in _PAGES.items():
        _add_page(router, renderer, path, partial(page, planner))
    add_check(router, renderer, pools)
    add_new_plan(router, renderer, pools, access)
    _add_login(router, access, renderer)
    app.include_router(router)
    return renderer


def _add_page(
    router: APIRouter, renderer: PageRenderer, path: str, page: Callable[[], Page]
) -> None:
    @router.get(path)
    def shown(made: Annotated[Page, Depends(page)]) -> Response:
        return renderer.render(made)


def _add_login(router: APIRouter, access: Access, renderer: PageRenderer) -> None:
    """Add the login, whose session only reads; without tokens it redirects to the wanted page."""

    def form(target: str, problem: Problem | None = None) -> Response:
        page = Page(
            template="login.html", title="Log in", problem=problem, context={"target": target}
        )
        answer = renderer.render(page)
        answer.headers.update({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
        return answer

    @router.get(LOGIN_PATH)
    async def show_form(request: Request) -> Response:
        target = _local_path(request.query_params.get("next", ""))
        return RedirectResponse(target, HTTPStatus.SEE_OTHER) if access.is_open else form(target)

    @router.post(LOGIN_PATH)
    async def log_in(request: Request) -> Response:
        fields = await read_form(request)
        target = _local_path(fields.get("next", ""))
        if access.right_of(fields.get("token", "").strip()) == "none":
            wrong = NotAuthorisedError("This is not a token of this service.")
            return form(target, problem_of(wrong))
        answer = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            COOKIE,
            access.sessions.open(),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    @router.post(LOGOUT_PATH)
    async def log_out(request: Request) -> Response:
        access.sessions.close(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse(LOGIN_PATH, HTTPStatus.SEE_OTHER)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer


def _local_path(target: str) -> str:
    """Return the path if it is on this service, else "/": a login must not redirect elsewhere."""
    is_local = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if is_local and target.isprintable() else "/"
