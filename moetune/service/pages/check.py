"""The page Check: a launch is pasted or dropped, and read as `moetune check` reads it.

The launch is neither run nor stored. A form's body holds it, as it is too long for an address.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from moetune.app.check import ASKED, LaunchText, check_text
from moetune.app.planner import ServicePlanner
from moetune.app.views.check import check_sections
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.question import ASKS
from moetune.report.section import Section
from moetune.service.bodies import read_form
from moetune.service.pages.library import machine_field, usual_profile
from moetune.service.pages.new_plan import field_of
from moetune.service.pages.page import Field, Page, PageRenderer
from moetune.service.problems import problem_of
from moetune.service.workers import WorkerPools

_HINTS = {"model": "Default: the file's.", "world_size": "Default: the launcher's."}
_VALUES = Field(
    name="variables", label="Variables", flag="--set",
    hint="of the environment, such as TP=2 NODES=4",
)  # fmt: skip
_ARGUMENTS = Field(name="arguments", label="Arguments", hint="that the script gets", flag="--")


def add_check(router: APIRouter, renderer: PageRenderer, pools: WorkerPools) -> None:
    """Add the form, and the route that takes it."""

    @router.get("/check")
    def form() -> Response:
        return renderer.render(_page(pools.planner, {}))

    @router.post("/check")
    async def checked(request: Request) -> Response:
        texts = await read_form(request)
        return renderer.render(await pools.solve(_answered, pools.planner, texts))


def _answered(planner: ServicePlanner, texts: Mapping[str, str]) -> Page:
    try:
        checked = check_text(planner, _launch(texts))
    except MoetuneError as error:
        return _page(planner, texts, error=error)
    return _page(planner, texts, sections=tuple(check_sections(checked)))


def _launch(texts: Mapping[str, str]) -> LaunchText:
    filled = {name: text.strip() for name, text in texts.items() if text.strip()}
    given: dict[str, Any] = {
        name: ASKS[name].read(filled[name]) for name in ASKED if name in filled
    }
    pairs = [word.partition("=") for word in filled.get("variables", "").split()]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        raise InputError(f"{wrong!r} is not NAME=VALUE", "such as TP=2", field="variables")
    return LaunchText(
        text=texts.get("text", "").replace("\r\n", "\n"), name=filled.get("name", ""),
        profile=filled.get("profile"), arguments=tuple(filled.get("arguments", "").split()),
        values={name: value for name, _, value in pairs}, **given,
    )  # fmt: skip


def _page(
    planner: ServicePlanner, texts: Mapping[str, str], *, sections: tuple[Section, ...] = (),
    error: MoetuneError | None = None,
) -> Page:  # fmt: skip
    filled = {name: text for name, text in texts.items() if text.strip()}
    model, world_size, target, *budget = (
        replace(field_of(ASKS[name]), hint=_HINTS.get(name, ASKS[name].words)) for name in ASKED
    )
    return Page(
        template="check.html", title="Check", here="check", sections=sections,
        problem=None if error is None else problem_of(error),
        context={
            "values": filled or {"profile": usual_profile(planner, for_models=True)},
            "first": (machine_field(planner), world_size, model),
            "more": (target, _VALUES, _ARGUMENTS, *budget),
            "where": "" if error is None else error.field,
        },
    )  # fmt: skip
