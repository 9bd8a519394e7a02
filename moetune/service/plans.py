"""Routes of plans: resolve, read, explain, trace, what-if, list."""

import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from moetune.app.plan import InputsDocument
from moetune.app.requests import ServedQuestion, asks_for_model, served_question
from moetune.app.subjects import WhyNot
from moetune.app.whatif import WHATIF_SCHEMA, WhatIf, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import canonical_json, shown
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.plan import Plan
from moetune.domain.spelling import AS_ARGUMENTS, spelled
from moetune.service import describe
from moetune.service.bodies import document, page, read_document, tagged
from moetune.service.describe import Limit, PlanCursor
from moetune.service.workers import KnownPlans, WorkerPools

INPUTS_SCHEMA = "moetune.inputs/1"
_ID = re.compile(r"[0-9a-f]{64}")
_CHOICES = ("degree", "forward_degree", "backward_degree", "strategy", "layout")


class PlainRoute(APIRoute):
    """A route without FastAPI's parsing and validation, for the most frequent request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint itself."""
        return cast("Callable[[Request], Coroutine[Any, Any, Response]]", self.endpoint)


def add_plans(app: FastAPI, pools: WorkerPools) -> None:
    """Add the routes; the most frequent one comes first, as routes are matched in order."""
    _add_known_plan(app, pools)
    _add_resolve(app, pools)
    _add_explain(app, pools)
    _add_trace(app, pools)
    _add_whatif(app, pools)
    _add_list(app, pools)


def _add_known_plan(app: FastAPI, pools: WorkerPools) -> None:
    known = KnownPlans(pools)

    async def plan(request: Request) -> Response:
        plan_id = full_id(request.path_params["plan_id"])
        text = await known.document(plan_id)
        if text is None:
            raise _unknown(plan_id)
        return tagged(text + "\n", request.headers.get("if-none-match"))

    app.router.add_api_route(
        "/v1/plans/{plan_id}",
        plan,
        route_class_override=PlainRoute,
        summary="A stored plan",
        description="The plan file of exactly this id, with an ETag.",
        response_model=Plan,
        openapi_extra=describe.PLAN_ID,
    )


def _add_resolve(app: FastAPI, pools: WorkerPools) -> None:
    @app.post(
        "/v1/plans:resolve",
        summary="The plan for these inputs",
        response_model=Plan,
        openapi_extra=describe.json_body(InputsDocument),
    )
    async def resolve(request: Request) -> Response:
        """Return the stored plan of the inputs, else solve for it and store it.

        Of the keys of a plan's `inputs` only `model` or `layer` is required. For a Hugging Face
        model the keys are the arguments of `moetune.plan`; `config` has the values of a
        `config.json` in the place of a name.
        """
        inputs = await read_document(request, pools, schema=INPUTS_SCHEMA)
        if asks_for_model(inputs):
            with spelled(AS_ARGUMENTS):
                question = await pools.read(served_question, inputs)
                plan: AnyPlan = await kept_answer(request, pools, question)
        else:
            plan = await _resolved(request, pools, inputs)
        answer = tagged(canonical_json(plan) + "\n", None)
        answer.headers["Content-Location"] = f"/v1/plans/{plan.id}"
        return answer


async def _resolved(request: Request, pools: WorkerPools, inputs: Mapping[str, object]) -> Plan:
    """Return the stored plan of the inputs, else solve for it, store it and count it."""
    plan = await pools.read(pools.planner.stored, inputs)
    if plan is None:
        await pools.may_add(request, "plans")
        plan = await pools.solve(pools.planner.resolve, inputs)
    return plan


async def kept_answer(request: Request, pools: WorkerPools, question: ServedQuestion) -> AnyPlan:
    """Return the answer of a question, which is stored and counted if it is new.

    Raises:
        QuotaError, StoreFullError: the client may not add it.
        MoetuneError: as of `Planner.ask`.
    """
    planner = pools.planner
    plan = (await pools.solve(planner.ask, *question)).plan
    if await pools.read(planner.reading.plan_document, plan.id) is None:
        await pools.may_add(request, "plans")
    await pools.write(planner.sources.save, plan)
    return plan


def _add_explain(app: FastAPI, pools: WorkerPools) -> None:
    @app.get(
        "/v1/plans/{plan_id}/explain",
        summary="The reasons of a plan, or why it is not another choice",
    )
    async def explain(
        request: Request,
        plan_id: str,
        degree: describe.OtherDegree = None,
        forward_degree: describe.OtherDegree = None,
        backward_degree: describe.OtherDegree = None,
        strategy: describe.OtherWay = None,
        layout: describe.OtherWay = None,
    ) -> Response:
        """Return the document of `moetune explain --json`.

        With another choice it is `moetune.why-not/1`: that one beside the plan's own.
        """
        question = WhyNot(
            degree=degree, forward_degree=forward_degree, backward_degree=backward_degree,
            strategy=strategy, layout=layout,
        )  # fmt: skip
        _check_query(request)
        with spelled(AS_ARGUMENTS):
            return document(await _explained(pools, plan_id, question))


async def _explained(pools: WorkerPools, plan_id: str, question: WhyNot) -> Mapping[str, object]:
    """Return the document of a plan's reasons, or of the other choice that is asked for."""
    plan = await _stored(pools, plan_id)
    if question.is_asked:
        return (await pools.solve(pools.planner.why_not, plan, question)).document
    return (await pools.read(pools.planner.explain, plan)).document


def _add_trace(app: FastAPI, pools: WorkerPools) -> None:
    @app.get(
        "/v1/plans/{plan_id}/trace",
        summary="A plan's predicted timeline",
    )
    async def trace(plan_id: str) -> Response:
        """Return a Chrome trace for ui.perfetto.dev."""
        found = await pools.solve(pools.planner.trace, await _stored(pools, plan_id))
        name = f'attachment; filename="trace-{plan_id[:6]}.json"'
        return document(found.document, headers={"Content-Disposition": name})


def _add_whatif(app: FastAPI, pools: WorkerPools) -> None:
    @app.post(
        "/v1/whatif",
        summary="A plan for changed inputs or speeds",
        openapi_extra=describe.json_body(describe.ChangeDocument),
    )
    async def changed(request: Request) -> Response:
        """Plan again with other inputs or speeds; nothing is stored."""
        body = await read_document(request, pools, schema=WHATIF_SCHEMA)
        question, before = question_in(body), await _before(pools, body)
        answer = await pools.solve(whatif, pools.planner, before, question)
        return document(answer.document)


async def _before(pools: WorkerPools, body: Mapping[str, object]) -> AnyPlan:
    """Return the plan to change: a stored one, else that of inputs, which is not stored."""
    planner, plan_id, inputs = pools.planner, body.get("plan_id"), _table(body, "inputs")
    if plan_id is not None and not isinstance(plan_id, str):
        raise InputError(f"plan_id must be a string, got {shown(plan_id)}")
    if (plan_id is None) == (not inputs):
        raise InputError(
            "the plan to change is not named", "give either the plan's id or its inputs"
        )
    if plan_id is not None:
        return await _stored(pools, plan_id)
    if not asks_for_model(inputs):
        return await pools.solve(planner.drafted, inputs)
    with spelled(AS_ARGUMENTS):
        asked = await pools.read(served_question, inputs)
        return (await pools.solve(planner.ask, *asked)).plan


def _add_list(app: FastAPI, pools: WorkerPools) -> None:
    @app.get("/v1/plans", summary="Stored plans", response_model=describe.PageDocument)
    async def plans(after: PlanCursor = "", limit: Limit = 50) -> Response:
        """List the plans, newest first."""
        rows = await pools.read(pools.planner.reading.plan_page, after=after, limit=limit + 1)
        return page("moetune.plans/1", rows, limit=limit, cursor=lambda row: row.id)


def question_in(body: Mapping[str, object]) -> WhatIf:
    """Return the what-if question in a body.

    Raises:
        InputError: an unknown key, or a value of the wrong type.
    """
    known = ("plan_id", "inputs", "changes", "speeds")
    for key in body:
        if key not in known:
            raise InputError(
                f"the body has the unknown key {shown(key)}", f"known: {', '.join(known)}"
            )
    return WhatIf(
        changes=_table(body, "changes"),
        speeds=cast("Mapping[str, float]", _table(body, "speeds")),  # the planner checks them
    )


def full_id(plan_id: str) -> str:
    """Return the id; over HTTP beginnings of ids are not accepted.

    Raises:
        NotFoundError: it does not have 64 hexadecimal digits.
    """
    if not _ID.fullmatch(plan_id):
        raise NotFoundError(
            f"{plan_id[:80]!r} is not a plan's id",
            "give all 64 hexadecimal digits; GET /v1/plans lists the ids",
        )
    return plan_id


def _check_query(request: Request) -> None:
    """Raise InputError for an unknown parameter: the answer would be to another question."""
    for key in request.query_params:
        if key not in _CHOICES:
            raise InputError(
                f"the query has the unknown parameter {shown(key)}", f"known: {', '.join(_CHOICES)}"
            )


async def _stored(pools: WorkerPools, plan_id: str) -> AnyPlan:
    """Return the stored plan with exactly this id."""
    await _require(pools, plan_id)
    return await pools.read(pools.planner.sources.plan, plan_id)


async def _require(pools: WorkerPools, plan_id: str) -> None:
    found = await pools.read(pools.planner.reading.plan_document, full_id(plan_id))
    if found is None:
        raise _unknown(plan_id)


def _unknown(plan_id: str) -> NotFoundError:
    return NotFoundError(f"no plan has the id {plan_id}", "POST /v1/plans:resolve makes one")


def _table(body: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = body.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{key} must be an object, got {shown(value)}")
    return value
