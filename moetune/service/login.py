"""Login form for browsers: the token is sent once, then a session that only reads stands for it."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from moetune.service.access import Access
from moetune.service.bodies import read_form
from moetune.service.middleware import COOKIE, LOGIN_PATH, LOGOUT_PATH
from moetune.service.pages.page import Page, PageRenderer


def add_login(app: FastAPI, access: Access, renderer: PageRenderer) -> None:
    """Add the routes of the form; without tokens it redirects to the wanted page."""

    def form(target: str, problem: str = "") -> Response:
        status = HTTPStatus.UNAUTHORIZED if problem else HTTPStatus.OK
        context = {"target": target, "problem": problem}
        page = Page(template="login.html", title="Log in", context=context, status=status)
        answer = renderer.render(page)
        answer.headers.update({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
        return answer

    @app.get(LOGIN_PATH, include_in_schema=False)
    async def show_form(request: Request) -> Response:
        target = _own_path(request.query_params.get("next", ""))
        if access.is_open:
            return RedirectResponse(target, HTTPStatus.SEE_OTHER)
        return form(target)

    @app.post(LOGIN_PATH, include_in_schema=False)
    async def log_in(request: Request) -> Response:
        fields = await read_form(request)
        target = _own_path(fields.get("next", ""))
        if access.right_of(fields.get("token", "").strip()) == "none":
            return form(target, "This is not a token of this service.")
        answer = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        answer.set_cookie(
            COOKIE,
            access.sessions.open(),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    @app.post(LOGOUT_PATH, include_in_schema=False)
    async def log_out(request: Request) -> Response:
        access.sessions.close(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse(LOGIN_PATH, HTTPStatus.SEE_OTHER)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer


def _own_path(target: str) -> str:
    """Return the path if it is on this service, else "/": a login must not redirect elsewhere."""
    is_own = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if is_own and target.isprintable() else "/"
