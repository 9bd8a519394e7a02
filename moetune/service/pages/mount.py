"""Adds the page's addresses to the application."""

from fastapi import FastAPI

from moetune.service.pages.library import Library
from moetune.service.pages.routes import page_router
from moetune.service.pages.shell import Shell
from moetune.service.pages.static import static_router
from moetune.workflows.desk import Desk


def mount(app: FastAPI, desk: Desk) -> None:
    """Serve the page and the files that it needs; all of it reads, nothing writes.

    Raises:
        MoetuneError: plotly or Jinja2 is not installed.
    """
    static, addresses = static_router()
    shell = Shell(addresses=addresses, location=desk.reading.location)
    app.include_router(static)
    app.include_router(page_router(Library(desk), shell))
