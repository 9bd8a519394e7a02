"""Routes of the pages. All are GET and write nothing, but those of `new_plan`."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Response
from starlette.responses import RedirectResponse

from moetune.service.access import Access
from moetune.service.pages.library import Library
from moetune.service.pages.machines import machines_page, observed_page, profile_page
from moetune.service.pages.models import model_page, models_page
from moetune.service.pages.new_plan import new_plan_router
from moetune.service.pages.page import Page, PageRenderer, Text, address, static_files
from moetune.service.pages.plans import compare_page, plan_page, plans_page
from moetune.service.pages.whatif import whatif_page
from moetune.service.workers import WorkerPools

_PAGES: Mapping[str, Callable[..., Page]] = MappingProxyType(
    {
        "/plans/{plan_id}": plan_page,
        "/": plans_page,
        "/machines": machines_page,
        "/profiles/{name:path}": profile_page,
        "/observed": observed_page,
        "/models": models_page,
        "/models/{name:path}": model_page,
        "/compare": compare_page,
        "/whatif": whatif_page,
    }
)
"""By address, whose parts and fields are the page's arguments behind the library."""


def page_router(library: Library, renderer: PageRenderer) -> APIRouter:
    """Return the routes of all pages, and of the data of their figures."""
    router = APIRouter(include_in_schema=False, route_class=renderer.route_class())

    def add(path: str, page: Callable[[], Page]) -> None:
        @router.get(f"{path.removesuffix('/')}/{{figure}}.csv")
        def data(figure: str, made: Annotated[Page, Depends(page)]) -> Response:
            return made.data(figure)

        @router.get(path)
        def shown(made: Annotated[Page, Depends(page)]) -> Response:
            return renderer.render(made)

    for path, page in _PAGES.items():
        add(path, partial(page, library))

    @router.get("/plans")
    def find(plan: Text = "") -> Response:
        place = address("plans", library.any_plan(plan.lower()).id) if plan else "/"
        return RedirectResponse(place, 303)

    return router


def add_pages(app: FastAPI, pools: WorkerPools, access: Access) -> PageRenderer:
    """Add the pages and their static files to the application; return what renders them.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    static, addresses = static_files()
    planner = pools.planner
    renderer = PageRenderer(addresses=addresses, location=planner.reading.location)
    library = Library(planner)
    app.mount("/static", static)
    app.include_router(page_router(library, renderer))
    app.include_router(new_plan_router(library, renderer, pools, access))
    return renderer
