"""Answers to requests for plans: resolve, read, trace, what-if, check, list."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from moetune.app.check import LaunchText, check_text
from moetune.app.plan import check_fingerprint
from moetune.app.planner import ServicePlanner
from moetune.app.requests import ServedQuestion, asks_for_model, served_question
from moetune.app.views.check import check_document, check_sections
from moetune.app.whatif import WhatIf, arguments_of, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import canonical_json, decode, shown
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.spelling import AS_ARGUMENTS, spelled
from moetune.domain.training_document import TrainingInputs
from moetune.report.section import values_of
from moetune.service.bodies import (
    JSON,
    Limit,
    PlanCursor,
    PlanId,
    document,
    page,
    parse_json,
    read_body,
    read_document,
    with_etag,
)
from moetune.service.workers import WorkerPools

INPUTS_SCHEMA = "moetune.inputs/1"
_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeDocument:
    """A stored plan or inputs, and the changes: other inputs, or other speeds of the machine."""

    schema: Literal["moetune.whatif/1"] = "moetune.whatif/1"
    plan_id: str | None = None
    inputs: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


async def stored_plan(pools: WorkerPools, request: Request, plan_id: PlanId) -> Response:
    """Return the plan file of exactly this id, with an ETag."""
    return with_etag(await _document(pools, plan_id) + "\n", request.headers.get("if-none-match"))


async def resolve(pools: WorkerPools, request: Request) -> Response:
    """Return the stored plan of the inputs, else solve for it and store it.

    Of the keys of a plan's `inputs` only `model` or `layer` is required. For a whole model the
    keys are those of its plan's `inputs`, or the arguments of `moetune.plan`; `config` has the
    values of a `config.json` in the place of a name.
    """
    _, content = await read_body(request, kinds=(JSON,))
    inputs = await pools.read(parse_json, content)
    if not isinstance(inputs, dict):
        raise InputError("the body must be a JSON object")
    if (schema := inputs.pop("schema", INPUTS_SCHEMA)) != INPUTS_SCHEMA:
        raise InputError(f"the body has schema {shown(schema)}, not {INPUTS_SCHEMA!r}")
    plan: AnyPlan | None
    if asks_for_model(inputs):
        with spelled(AS_ARGUMENTS):
            question = await pools.read(_model_question, pools.planner, inputs)
            plan = await answer_and_store(pools, question)
    else:
        plan = await pools.read(pools.planner.stored, inputs)
        if plan is None:
            plan = await pools.solve(pools.planner.resolve, inputs)
    answer = with_etag(canonical_json(plan) + "\n", None)
    answer.headers["Content-Location"] = f"/v1/plans/{plan.id}"
    return answer


def _model_question(planner: ServicePlanner, inputs: Mapping[str, object]) -> ServedQuestion:
    """Return the question of a whole model from its arguments, or from its plan's `inputs`."""
    if "pins" not in inputs:
        return served_question(inputs)
    sent = decode(TrainingInputs, inputs, "inputs")
    profile = planner.sources.profile(sent.profile).profile
    check_fingerprint(profile, sent.profile_fingerprint or None)
    return served_question({**arguments_of(sent, None), "profile": sent.profile})


async def answer_and_store(pools: WorkerPools, question: ServedQuestion) -> AnyPlan:
    """Solve for a question's plan, store it and return it; raise the errors of `Planner.ask`."""
    plan = (await pools.solve(pools.planner.ask, *question)).plan
    await pools.write(pools.planner.sources.save, plan)
    return plan


async def trace(pools: WorkerPools, plan_id: PlanId) -> Response:
    """Return a Chrome trace for ui.perfetto.dev."""
    predicted = await pools.solve(pools.planner.trace, await _stored(pools, plan_id))
    name = f'attachment; filename="trace-{plan_id[:6]}.json"'
    return document(predicted.document, headers={"Content-Disposition": name})


async def changed(pools: WorkerPools, request: Request) -> Response:
    """Plan again with other inputs or speeds; nothing is stored."""
    asked = await read_document(request, pools, ChangeDocument)
    before = await _before(pools, asked.plan_id, asked.inputs)
    question = WhatIf(changes=asked.changes, speeds=asked.speeds)
    return document((await pools.solve(whatif, pools.planner, before, question)).document)


async def _before(pools: WorkerPools, plan_id: str | None, inputs: Mapping[str, object]) -> AnyPlan:
    """Return the plan to change: a stored plan, or the plan of inputs, which is not stored."""
    planner = pools.planner
    if (plan_id is None) == (not inputs):
        raise InputError(
            "the plan to change is not named", "give either the plan's id or its inputs"
        )
    if plan_id is not None:
        return await _stored(pools, plan_id)
    if not asks_for_model(inputs):
        return await pools.solve(planner.draft, inputs)
    with spelled(AS_ARGUMENTS):
        asked = await pools.read(_model_question, planner, inputs)
        return (await pools.solve(planner.ask, *asked)).plan


async def checked(pools: WorkerPools, request: Request) -> Response:
    """Return what a launch runs, what stops it, and what would be better.

    Nothing of the text is run, and no file that it names is read. Nothing is stored.
    """
    sent = await read_document(request, pools, LaunchText)
    checked = await pools.solve(check_text, pools.planner, sent)
    sections = [values_of(section) for section in check_sections(checked)]
    return document({**check_document(checked), "sections": sections})


async def stored_plans(pools: WorkerPools, after: PlanCursor = "", limit: Limit = 50) -> Response:
    """List the plans, newest first."""
    rows = await pools.read(pools.planner.reading.plans, after=after, limit=limit + 1)
    return page("moetune.plans/1", rows, limit=limit)


async def _stored(pools: WorkerPools, plan_id: str) -> AnyPlan:
    await _document(pools, plan_id)
    return await pools.read(pools.planner.sources.plan, plan_id)


async def _document(pools: WorkerPools, plan_id: str) -> str:
    """Return the JSON of the stored plan with exactly this id; raise NotFoundError without it."""
    if not _ID.fullmatch(plan_id):
        raise NotFoundError(
            f"{plan_id[:80]!r} is not a plan's id",
            "give all 64 hexadecimal digits; GET /v1/plans lists the ids",
        )
    text = await pools.plan_document(plan_id)
    if text is None:
        raise NotFoundError(f"no plan has the id {plan_id}", "POST /v1/plans:resolve makes plans")
    return text
