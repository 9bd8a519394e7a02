"""Routes of the pages. All are GET and write nothing, but those of `new_plan`."""

from collections.abc import Callable, Iterable
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from starlette.responses import RedirectResponse

from moetune.service.access import Access
from moetune.service.pages.library import Library
from moetune.service.pages.machines import machines_page, observed_page, profile_page
from moetune.service.pages.models import MEMORY_FIELDS, model_page, models_page
from moetune.service.pages.new_plan import new_plan_router
from moetune.service.pages.page import Page, PageRenderer, address, static_files
from moetune.service.pages.plans import ListFilter, compare_page, plan_page, plans_page
from moetune.service.pages.whatif import FIELDS, WhatIfForm, whatif_page
from moetune.service.workers import WorkerPools

_LONGEST = 200
_Text = Annotated[str, Query(max_length=_LONGEST)]


def page_router(library: Library, renderer: PageRenderer) -> APIRouter:
    """Return the routes of all pages."""
    router = APIRouter(include_in_schema=False, route_class=renderer.route_class())

    def add(path: str, page: Callable[..., Page]) -> None:
        """Add a page, whose arguments are of its address, and the data of its figures."""

        @router.get(f"{path.removesuffix('/')}/{{figure}}.csv")
        def data(figure: str, made: Annotated[Page, Depends(page)]) -> Response:
            return made.data(figure)

        @router.get(path)
        def shown(made: Annotated[Page, Depends(page)]) -> Response:
            return renderer.render(made)

    for add_pages_of in (_add_plans, _add_measurements, _add_questions):
        add_pages_of(add, library)

    @router.get("/plans")
    def find(plan: _Text = "") -> Response:
        if not plan.strip():
            return RedirectResponse("/", 303)
        found = library.any_plan(plan.strip().lower())
        return RedirectResponse(address("plans", found.id), 303)

    return router


_Add = Callable[[str, Callable[..., Page]], None]


def _add_plans(add: _Add, library: Library) -> None:
    def plan(plan_id: str) -> Page:
        return plan_page(library, plan_id)

    def plans(after: _Text = "", model: _Text = "", profile: _Text = "", kind: _Text = "") -> Page:
        wanted = ListFilter(model=model.strip(), profile=profile.strip(), kind=kind.strip())
        return plans_page(library, wanted=wanted, after=after)

    add("/plans/{plan_id}", plan)
    add("/", plans)


def _add_measurements(add: _Add, library: Library) -> None:
    def machines() -> Page:
        return machines_page(library)

    def profile(name: str, operation: _Text = "") -> Page:
        return profile_page(library, name, operation=operation)

    def observed(plan: _Text = "", after: _Text = "") -> Page:
        return observed_page(library, plan=plan.strip().lower(), after=after)

    add("/machines", machines)
    add("/profiles/{name:path}", profile)
    add("/observed", observed)


def _add_questions(add: _Add, library: Library) -> None:
    def model(request: Request, name: str) -> Page:
        return model_page(library, name, _filled(request, MEMORY_FIELDS))

    def compared(what: _Text = "plans", first: _Text = "", second: _Text = "") -> Page:
        return compare_page(library, what=what, first=first.strip(), second=second.strip())

    def answered(request: Request) -> Page:
        fields = _filled(request, ("plan", *FIELDS))
        return whatif_page(library, WhatIfForm(plan=fields.pop("plan", ""), fields=fields))

    add("/models", models_page)
    add("/models/{name:path}", model)
    add("/compare", compared)
    add("/whatif", answered)


def _filled(request: Request, names: Iterable[str]) -> dict[str, str]:
    """Return the fields of an address that have a text."""
    given = {name: request.query_params.get(name, "").strip()[:_LONGEST] for name in names}
    return {name: text for name, text in given.items() if text}


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
