"""The page New plan: what is asked in fields, its answer, and what can be taken from it.

Nothing that a field asks is stored. `/new/answer` is the answer alone, which a script puts into the
page; without it the form is sent as a whole. The front of a model takes as long as its plan, so it
is a page of its own, `/new/front`, which the script puts under the answer once nothing changes.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from moetune.domain.errors import InputError, MoetuneError, ProfileError
from moetune.domain.layer import ACTIVATIONS
from moetune.domain.model import MODELS
from moetune.domain.targets import TARGETS
from moetune.domain.training import TRAINING_DTYPES
from moetune.domain.units import DTYPE_BYTES
from moetune.huggingface.pasted import MOST_BYTES
from moetune.huggingface.registry import model_names
from moetune.service.access import Access
from moetune.service.bodies import FORM, read_body
from moetune.service.middleware import KEEP_PATH, may_write, right_in
from moetune.service.pages.library import Library
from moetune.service.pages.new_plan_answers import answer_of, front_of, model_plan
from moetune.service.pages.new_plan_form import CUSTOM, LABELS, PASTED, NewPlanForm
from moetune.service.pages.page import Page, PageRenderer, address
from moetune.service.plans import resolved
from moetune.service.problems import ForbiddenError, problem_of
from moetune.service.workers import WorkerPools

_MOST_FIELDS = 60
_SLIDERS: Mapping[str, tuple[str, ...]] = {
    "world_size": tuple(str(2**at) for at in range(13)),
    "tokens_per_rank": tuple(
        str(size) for at in range(8, 18) for size in (2**at, 3 * 2 ** (at - 1))
    )[:-1],
    "global_batch": tuple(str(2**at) for at in range(3, 15)),
    "seq": tuple(str(2**at) for at in range(9, 18)),
    "memory_limit": (
        *(f"{size}GiB" for size in (8, 11, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 288)),
        "",
    ),
}
"""Values of the sliders; the last of the memory is all that a device has."""
_REFERENCE = "h100-x8"
_DEFAULTS = {
    "kind": "layer", "model": "gpt-xl", "decoder": "qwen3-30b-a3b", "target": "megatron",
    "global_batch": "512", "seq": "4096",
}  # fmt: skip
_FIRST_ON_OWN = {"model": "gpt-s", "modelled": "1"}
"""Small, as a machine of one's own may be."""
_FIRST_VISIT = {"tokens_per_rank": "8192", "world_size": "64", "modelled": "1"}
_SIZES = {
    "d_model": "2048", "d_hidden": "8192", "num_experts": "64", "top_k": "1", "activation": "gelu",
}  # fmt: skip
_BOTH = ["GET", "POST"]
"""A pasted configuration that is too long for an address comes in a body."""
_LAYERS = tuple(MODELS)


def new_plan_router(
    library: Library, renderer: PageRenderer, pools: WorkerPools, access: Access
) -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False, route_class=renderer.route_class())
    shows = _Shows(library=library, renderer=renderer, pools=pools, access=access)

    @router.get("/new")
    async def page(request: Request) -> Response:
        given = dict(request.query_params)
        if given.get("decoder") == PASTED and given.get("config_text", "").strip():
            return await shows.packed(request, given)
        found = await shows.page(request, await shows.form(given))
        if not _asked(given):  # nothing that was asked is wrong
            found.status_code = HTTPStatus.OK
        return found

    @router.post("/new")
    async def pasted(request: Request) -> Response:
        return await shows.packed(request, await _fields(request))

    @router.api_route("/new/answer", methods=_BOTH)
    async def answer(request: Request) -> Response:
        return await shows.answer(request, await _given(request))

    @router.api_route("/new/front", methods=_BOTH)
    async def front(request: Request) -> Response:
        return await shows.front(await _given(request))

    @router.api_route("/new/plan.json", methods=_BOTH)
    async def plan_file(request: Request) -> Response:
        return await shows.plan_file(await _given(request))

    @router.post(KEEP_PATH)
    async def keep(request: Request) -> Response:
        return await shows.keep(request, await _fields(request))

    return router


async def _given(request: Request) -> dict[str, str]:
    """Return the fields of an address, or of a form's body."""
    if request.method == "POST":
        return await _fields(request)
    return dict(request.query_params)


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form's body; of one that comes twice the last."""
    _, content = await read_body(request, kinds=(FORM,))
    try:
        pairs = parse_qsl(content.decode(), max_num_fields=_MOST_FIELDS)
    except UnicodeDecodeError:
        raise InputError("the form is not UTF-8") from None
    except ValueError:
        raise InputError(f"the form has more than {_MOST_FIELDS} fields") from None
    return dict(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shows:
    """Answers of the routes."""

    library: Library
    renderer: PageRenderer
    pools: WorkerPools
    access: Access

    async def form(self, given: Mapping[str, str]) -> NewPlanForm:
        """Return the form of an address or a body, with the defaults of what it leaves out."""
        asked = _asked(given)
        own = asked.get("profile") or await self.pools.read(self._own_profile)
        first = {"profile": own or _REFERENCE}
        if not asked:
            first |= _FIRST_ON_OWN if own else _FIRST_VISIT
        return NewPlanForm.of({**_DEFAULTS, **first, **asked})

    def _own_profile(self) -> str:
        """Return the profile that plans are made with where none is named; "" where none is."""
        try:
            return self.pools.planner.sources.profile(None).profile.name
        except ProfileError:
            return ""

    async def page(self, request: Request, form: NewPlanForm) -> Response:
        """Return the page with its answer."""
        context, status = await self._answered(request, form)
        more = await self.pools.read(self._choices, form)
        return self._render("new_plan.html", {**more, **context}, status)

    async def answer(self, request: Request, given: Mapping[str, str]) -> Response:
        """Return the answer alone."""
        try:
            form = await self.form(given)
        except InputError as error:
            context, status = _problem(error)
        else:
            context, status = await self._answered(request, form)
        return self._render("new_plan_answer.html", context, status)

    async def front(self, given: Mapping[str, str]) -> Response:
        """Return the page of a model's front, which a script takes the front out of."""
        form = await self.form(given)
        shown, query = await front_of(self.pools, form), form.query
        back = None if query is None else address("new", **query)
        return self._render("new_plan_front.html", {"shown": shown, "back": back}, HTTPStatus.OK)

    async def packed(self, request: Request, given: Mapping[str, str]) -> Response:
        """Redirect to the address of a pasted configuration, or where it is too long, answer."""
        form = await self.form({**given, "kind": "model", "decoder": PASTED})
        try:
            query = form.query
        except InputError:
            query = None  # the page says what is wrong
        if query is None:
            return await self.page(request, form)
        return RedirectResponse(address("new", **query), HTTPStatus.SEE_OTHER)

    async def plan_file(self, given: Mapping[str, str]) -> Response:
        """Return a model's plan as `moetune plan --output` writes it."""
        form = await self.form({**given, "kind": "model"})
        plan = await model_plan(self.pools, form)
        name = f"plan-{plan.id[:6]}.json"
        return Response(
            plan.stored.text, media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}"',
                     "Cache-Control": "no-store"},
        )  # fmt: skip

    async def keep(self, request: Request, given: Mapping[str, str]) -> Response:
        """Store the plan, and redirect to its page.

        Raises:
            ForbiddenError: neither the request nor the form has the write token.
            QuotaError, StoreFullError: the client may not add it.
        """
        if not may_write(request.scope, self.access, given.get("token", "").strip()):
            raise ForbiddenError(
                "keeping a plan needs the write token, and this is not it",
                "go back and give it in the field beside Keep",
            )
        form = await self.form(given)
        if form.is_model:
            plan_id = await self._keep_model(request, form)
        else:
            plan_id = (await resolved(request, self.pools, form.layer_inputs())).id
        return RedirectResponse(address("plans", plan_id), HTTPStatus.SEE_OTHER)

    async def _keep_model(self, request: Request, form: NewPlanForm) -> str:
        plan = await model_plan(self.pools, form)
        planner = self.pools.planner
        if await self.pools.read(planner.reading.training_plan, plan.id) is None:
            await self.pools.may_add(request, "plans")
            await self.pools.write(planner.store.save_training_plan, plan.stored)
        return plan.id

    async def _answered(self, request: Request, form: NewPlanForm) -> tuple[dict[str, object], int]:
        """Return the variables of the answer's template, and the status."""
        try:
            answer = await answer_of(self.pools, form)
            query = form.query
        except MoetuneError as error:
            context, status = _problem(error)
            return {**context, "address": _address(form)}, status
        return {
            "problem": None,
            "answer": answer,
            "form": form,
            "address": None if query is None else address("new", **query),
            "front_address": None if query is None else address("new", "front", **query),
            "may_write": right_in(request.scope) == "write",
            "kept_fields": query or {name: text for name, text in form.fields.items() if text},
        }, HTTPStatus.OK

    def _choices(self, form: NewPlanForm) -> dict[str, object]:
        """Return the variables of the form's template."""
        return {
            "values": {name: form[name] or _SIZES.get(name, "") for name in LABELS},
            "labels": LABELS,
            "sliders": _SLIDERS,
            "profiles": _same(self.library.profile_names()),
            "layer_choices": [
                *((name, MODELS[name].title) for name in _LAYERS), (CUSTOM, "Sizes of my own"),
            ],
            "decoders": [*_same(model_names()), (PASTED, "A pasted configuration")],
            "targets": _same(TARGETS),
            "dtypes": _same(DTYPE_BYTES),
            "training_dtypes": _same(TRAINING_DTYPES[1:]),
            "activations": _same(ACTIVATIONS),
            "config_text": _shown_config(form),
            "most_pasted": MOST_BYTES,
        }  # fmt: skip

    def _render(self, template: str, context: Mapping[str, object], status: int) -> Response:
        page = Page(template=template, title="New plan", here="new", context=context, status=status)
        return self.renderer.render(page)


def _asked(given: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that have a text."""
    return {name: text for name, text in given.items() if name in LABELS and text.strip()}


def _same(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return choices that are shown as they are sent."""
    return [(name, name) for name in names]


def _problem(error: MoetuneError) -> tuple[dict[str, object], int]:
    return {"problem": error, "address": None}, int(problem_of(error).status)


def _address(form: NewPlanForm) -> str | None:
    """Return the address of a question without an answer; None where it has none."""
    try:
        query = form.query
    except InputError:
        return None
    return None if query is None else address("new", **query)


def _shown_config(form: NewPlanForm) -> str:
    """Return the configuration to show in its field: as it was pasted, or from the address."""
    if form["config_text"]:
        return form["config_text"]
    try:
        config = form.config
    except InputError:
        return ""
    return "" if config is None else json.dumps(json.loads(config.text), indent=2)
