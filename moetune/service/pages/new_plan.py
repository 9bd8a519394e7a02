"""The page New plan: a form with the flags of `moetune plan`, whose answer is a plan's page.

Only a plan that the user keeps is stored. The filled fields of a form become an address, which can
be shared. A form with a pasted configuration is too long for an address, and is answered at once.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from moetune.app.planner import ServicePlanner
from moetune.app.requests import ServedQuestion, served_question
from moetune.app.views.plan import plan_sections
from moetune.domain.any_plan import AnyPlan
from moetune.domain.ask import GROUPS, Ask
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.model import MODELS
from moetune.domain.question import ASKS, read_texts
from moetune.domain.training import TRAINING_DTYPES
from moetune.domain.units import DTYPE_BYTES
from moetune.huggingface.pasted import NAME, pasted_config
from moetune.huggingface.registry import model_names
from moetune.report.section import Section
from moetune.service.access import Access
from moetune.service.bodies import read_form
from moetune.service.middleware import KEEP_PATH, may_write, right_in
from moetune.service.pages.library import machine_field, usual_profile
from moetune.service.pages.page import Field, Page, PageRenderer, address
from moetune.service.plans import answer_and_store
from moetune.service.problems import ForbiddenError, problem_of
from moetune.service.workers import WorkerPools

_EXAMPLE = {
    "model": "qwen3-30b-a3b", "target": "megatron", "world_size": "64", "global_batch": "512",
    "seq": "4096",
}  # fmt: skip
"""Values that the form shows for an address without fields."""
_NO_FILE = {"routing": "balanced or natural"}
"""Hints of fields that may name a file on a command line; the service reads no such file."""


def field_of(ask: Ask) -> Field:
    """Return the form's field for a field of the question."""
    choices = tuple(map(str, ask.choices))
    if ask.kind is bool:
        choices = ("yes",) if ask.is_switch else ("yes", "no")
    if ask.name == "dtype":
        choices = tuple(dict.fromkeys((*TRAINING_DTYPES, *DTYPE_BYTES)))
    return Field(
        name=ask.name, label=ask.label, hint=_NO_FILE.get(ask.name, ask.words), flag=ask.flag,
        choices=choices,
        suggested=dict.fromkeys((*model_names(), *MODELS), "") if ask.name == "model" else {},
    )  # fmt: skip


_FIRST = ("model", "world_size", "memory_limit", "dtype")
_GROUPS = {
    group.title: tuple(
        field_of(ask) for ask in ASKS.values() if ask.group is group and ask.name not in _FIRST
    )
    for group in GROUPS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Texts of the filled fields of a form.

    Args:
        config_text: a configuration as it was pasted.
    """

    texts: Mapping[str, str]
    config_text: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "_Form":
        """Return the form from the fields of an address or a body."""
        texts = {name: text.strip() for name, text in given.items() if text.strip()}
        texts.pop("token", None)
        config_text = texts.pop("config_text", "")
        return cls(texts=texts, config_text=config_text)

    def question(self) -> ServedQuestion:
        """Return the question, or raise InputError for an unknown field or a wrong text."""
        texts = dict(self.texts)
        more: dict[str, object] = {"profile": texts.pop("profile", None)}
        if "config" in texts:
            what = "an address has no configuration any more"
            raise InputError(what, "paste it", field="config_text")
        if self.config_text:
            more["config"] = pasted_config(self.config_text)
        return served_question({**read_texts(texts), **more})

    def command(self) -> str:
        """Return the command that asks the same."""
        model = {"model": f"{NAME}/config.json"} if self.config_text else {}
        return shlex.join(
            word
            for name, text in (model | dict(self.texts)).items()
            for word in _flag(name.replace("_", "-"), text)
        )


def _flag(name: str, text: str) -> tuple[str, ...]:
    if text == "yes":
        return (f"--{name}",)
    return (f"--no-{name}",) if text == "no" else (f"--{name}", text)


def new_plan_page(planner: ServicePlanner, request: Request) -> Page:
    """Return the form with an example, with the address's answer, or with an error."""
    form = _Form.of(request.query_params)
    if form.texts:
        return _answered(planner, request, form)
    return _page(planner, request, _Form(texts={**_EXAMPLE, "profile": usual_profile(planner)}))


def add_new_plan(
    router: APIRouter, renderer: PageRenderer, pools: WorkerPools, access: Access
) -> None:
    """Add the routes of the form: the first redirects to its address, the second keeps the plan."""

    @router.post("/new")
    async def asked(request: Request) -> Response:
        form = _Form.of(await read_form(request))
        if form.config_text:  # too long for an address
            return renderer.render(await pools.solve(_answered, pools.planner, request, form))
        there = address("new", **form.texts)
        return RedirectResponse(f"{there}#planned", HTTPStatus.SEE_OTHER)

    @router.post(KEEP_PATH)
    async def keep(request: Request) -> Response:
        fields = await read_form(request)
        if not may_write(request.scope, access, fields.get("token", "").strip()):
            raise ForbiddenError(
                "keeping a plan needs the write token, and this is not it",
                "go back and give it in the field next to Keep",
            )
        form = _Form.of(fields)
        try:
            plan = await answer_and_store(pools, await pools.read(form.question))
        except MoetuneError as error:
            page = await pools.read(_page, pools.planner, request, form, error=error)
            return renderer.render(page)
        return RedirectResponse(address("plans", plan.id), HTTPStatus.SEE_OTHER)


def _answered(planner: ServicePlanner, request: Request, form: _Form) -> Page:
    try:
        plan = planner.ask(*form.question()).plan
        sections = plan_sections(planner.explain(plan), is_page=True)
    except MoetuneError as error:
        return _page(planner, request, form, error=error)
    return _page(planner, request, form, plan=plan, sections=sections)


def _page(
    planner: ServicePlanner, request: Request, form: _Form, *, plan: AnyPlan | None = None,
    sections: tuple[Section, ...] = (), error: MoetuneError | None = None,
) -> Page:  # fmt: skip
    return Page(
        template="new_plan.html",
        title="New plan",
        here="new",
        problem=None if error is None else problem_of(error),
        sections=sections,
        context={
            "values": {"profile": "", **form.texts}, "config_text": form.config_text,
            "first": (*(field_of(ASKS[name]) for name in _FIRST), machine_field(planner)),
            "groups": _GROUPS, "plan": plan,
            "where": "" if error is None else _field_of(error, form),
            "command": f"moetune plan {form.command()}",
            "may_write": right_in(request.scope) == "write",
        },
    )  # fmt: skip


def _field_of(error: MoetuneError, form: _Form) -> str:
    if "configuration" in error.what and form.config_text:
        return "config_text"
    return error.field
