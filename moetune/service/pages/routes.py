"""Routes of the pages. All are GET and write nothing, but those of `new_plan` and of uploads."""

from collections.abc import Callable, Iterable
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from starlette.responses import RedirectResponse

from moetune.domain.errors import MoetuneError
from moetune.service.access import Access
from moetune.service.bodies import MULTIPART, read_form
from moetune.service.middleware import UPLOAD_PATH, right_in
from moetune.service.pages.library import Library
from moetune.service.pages.machines import Upload, machines_page, observed_page, profile_page
from moetune.service.pages.models import MEMORY_FIELDS, model_page, models_page
from moetune.service.pages.new_plan import new_plan_router
from moetune.service.pages.page import Page, PageRenderer, address, static_files
from moetune.service.pages.plans import ListFilter, compare_page, plan_page, plans_page
from moetune.service.pages.whatif import FIELDS, WhatIfForm, whatif_page
from moetune.service.profiles import store_profile
from moetune.service.uploads import check_own_page, check_write, uploaded_profile
from moetune.service.workers import WorkerPools

_MOST_FIELDS = 10
_LONGEST = 200
_Text = Annotated[str, Query(max_length=_LONGEST)]


def page_router(library: Library, renderer: PageRenderer) -> APIRouter:
    """Return the routes of all pages."""
    router = APIRouter(include_in_schema=False, route_class=renderer.route_class())
    for add in (_add_plans, _add_machines, _add_models, _add_observed, _add_questions):
        add(router, library, renderer.render)
    return router


_Show = Callable[[Page], Response]


def _add_plans(router: APIRouter, library: Library, show: _Show) -> None:
    @router.get("/")
    def plans(
        after: _Text = "", model: _Text = "", profile: _Text = "", kind: _Text = ""
    ) -> Response:
        wanted = ListFilter(model=model.strip(), profile=profile.strip(), kind=kind.strip())
        return show(plans_page(library, wanted=wanted, after=after))

    @router.get("/plans")
    def find(plan: _Text = "") -> Response:
        if not plan.strip():
            return RedirectResponse("/", 303)
        found = library.any_plan(plan.strip().lower())
        return RedirectResponse(address("plans", found.id), 303)

    @router.get("/plans/{plan_id}/{figure}.csv")
    def plan_csv(plan_id: str, figure: str) -> Response:
        return plan_page(library, plan_id).data(figure)

    @router.get("/plans/{plan_id}")
    def plan(plan_id: str) -> Response:
        return show(plan_page(library, plan_id))


def _add_machines(router: APIRouter, library: Library, show: _Show) -> None:
    @router.get(UPLOAD_PATH)
    def machines(request: Request) -> Response:
        upload = Upload(may_write=right_in(request.scope) == "write")
        return show(machines_page(library, upload=upload))

    @router.get("/profiles/{name:path}/{figure}.csv")
    def profile_csv(name: str, figure: str, operation: _Text = "") -> Response:
        return profile_page(library, name, operation=operation).data(figure)

    @router.get("/profiles/{name:path}")
    def profile(name: str, operation: _Text = "") -> Response:
        return show(profile_page(library, name, operation=operation))


def _add_models(router: APIRouter, library: Library, show: _Show) -> None:
    @router.get("/models")
    def models() -> Response:
        return show(models_page())

    @router.get("/models/{name:path}/{figure}.csv")
    def model_csv(request: Request, name: str, figure: str) -> Response:
        return model_page(library, name, _filled(request, MEMORY_FIELDS)).data(figure)

    @router.get("/models/{name:path}")
    def model(request: Request, name: str) -> Response:
        return show(model_page(library, name, _filled(request, MEMORY_FIELDS)))


def _filled(request: Request, names: Iterable[str]) -> dict[str, str]:
    """Return the fields of an address that have a text."""
    given = {name: request.query_params.get(name, "").strip()[:_LONGEST] for name in names}
    return {name: text for name, text in given.items() if text}


def _add_observed(router: APIRouter, library: Library, show: _Show) -> None:
    @router.get("/observed/{figure}.csv")
    def observed_csv(figure: str, plan: _Text = "") -> Response:
        return observed_page(library, plan=plan, after="").data(figure)

    @router.get("/observed")
    def observed(plan: _Text = "", after: _Text = "") -> Response:
        return show(observed_page(library, plan=plan.strip().lower(), after=after))


def _add_questions(router: APIRouter, library: Library, show: _Show) -> None:
    def compared(what: str, first: str, second: str) -> Page:
        return compare_page(library, what=what, first=first.strip(), second=second.strip())

    def answered(request: Request) -> Page:
        fields = _filled(request, ("plan", *FIELDS))
        return whatif_page(library, WhatIfForm(plan=fields.pop("plan", ""), fields=fields))

    @router.get("/compare/{figure}.csv")
    def compare_csv(
        figure: str, what: _Text = "plans", first: _Text = "", second: _Text = ""
    ) -> Response:
        return compared(what, first, second).data(figure)

    @router.get("/compare")
    def compare(what: _Text = "plans", first: _Text = "", second: _Text = "") -> Response:
        return show(compared(what, first, second))

    @router.get("/whatif/{figure}.csv")
    def whatif_csv(request: Request, figure: str) -> Response:
        return answered(request).data(figure)

    @router.get("/whatif")
    def whatif(request: Request) -> Response:
        return show(answered(request))


def _add_upload(
    router: APIRouter, library: Library, renderer: PageRenderer, pools: WorkerPools, access: Access
) -> None:
    @router.post(UPLOAD_PATH)
    async def upload(request: Request) -> Response:
        try:
            check_own_page(request)
            fields = await read_form(request, kind=MULTIPART, max_fields=_MOST_FIELDS)
            check_write(request, access, fields)
            profile = await pools.read(uploaded_profile, fields, pools.planner)
            await pools.may_add(request, "profiles")
            await pools.write(store_profile, pools.planner.store, profile)
        except MoetuneError as error:
            upload = Upload(may_write=right_in(request.scope) == "write", problem=error)
            return renderer.render(await pools.read(machines_page, library, upload=upload))
        return RedirectResponse(address("profiles", profile.name), 303)


def add_pages(app: FastAPI, pools: WorkerPools, access: Access) -> PageRenderer:
    """Add the pages and their static files to the application; return what renders them.

    Raises:
        MoetuneError: Jinja2 is not installed.
    """
    static, addresses = static_files()
    planner = pools.planner
    renderer = PageRenderer(addresses=addresses, location=planner.reading.location)
    library = Library(planner)
    pages = page_router(library, renderer)
    _add_upload(pages, library, renderer, pools, access)
    app.mount("/static", static)
    app.include_router(pages)
    app.include_router(new_plan_router(library, renderer, pools, access))
    return renderer
