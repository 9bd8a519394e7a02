"""Login form for browsers: the token is sent once, then a session that only reads stands for it."""

from html import escape
from http import HTTPStatus

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from moetune.service.access import Access
from moetune.service.bodies import read_form
from moetune.service.middleware import COOKIE, LOGIN_PATH, LOGOUT_PATH

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Log in · moetune</title>
<link rel="stylesheet" href="/static/moetune.css">
</head>
<body>
<main>
<h1>moetune</h1>
{problem}<form class="form" method="post" action="{action}">
<label>Token of this service
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
</label>
<input name="next" type="hidden" value="{target}">
<div class="actions"><button class="primary" type="submit">Log in</button></div>
</form>
</main>
</body>
</html>
"""


def add_login(app: FastAPI, access: Access) -> None:
    """Add the routes of the form; without tokens it redirects to the wanted page."""

    @app.get(LOGIN_PATH, include_in_schema=False)
    async def form(request: Request) -> Response:
        target = _own_path(request.query_params.get("next", ""))
        if access.is_open:
            return RedirectResponse(target, HTTPStatus.SEE_OTHER)
        return _form(target)

    @app.post(LOGIN_PATH, include_in_schema=False)
    async def log_in(request: Request) -> Response:
        fields = await read_form(request)
        target = _own_path(fields.get("next", ""))
        if access.right_of(fields.get("token", "").strip()) == "none":
            return _form(target, problem="This is not a token of this service.")
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


def _form(target: str, *, problem: str = "") -> Response:
    return HTMLResponse(
        _PAGE.format(
            action=LOGIN_PATH,
            target=escape(target, quote=True),
            problem=f'<p role="alert">{escape(problem)}</p>\n' if problem else "",
        ),
        HTTPStatus.UNAUTHORIZED if problem else HTTPStatus.OK,
        {"Cache-Control": "no-store"},
    )


def _own_path(target: str) -> str:
    """Return the path if it is on this service, else "/": a login must not redirect elsewhere."""
    is_own = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if is_own and target.isprintable() else "/"
