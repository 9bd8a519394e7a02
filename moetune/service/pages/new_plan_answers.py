"""Answers of the page New plan: a draft solved in a process, and what can be taken from it."""

from dataclasses import dataclass

from moetune.domain.errors import InputError
from moetune.domain.units import format_bytes, format_seconds
from moetune.service.pages.new_plan_form import PASTED, NewPlanForm
from moetune.service.pages.page import address
from moetune.service.workers import WorkerPools
from moetune.solve.layer.memory import device_bytes
from moetune.workflows.commands import layer_command, training_command
from moetune.workflows.drafts import (
    FrontDraft,
    LayerDraft,
    ModelDraft,
    TargetExport,
    draft_front,
    draft_layer,
    draft_model,
    plan_model,
)
from moetune.workflows.training_plan import TrainingPlan
from moetune.workflows.views.draft_front import FrontView, front_view
from moetune.workflows.views.drafts import DraftView, layer_view, model_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that the page shows of one question.

    Args:
        summary: of a few words, which is read aloud.
        command: that asks the same on the command line.
        exports: of a model's plan.
        paste_note: where the configuration of the command has to be.
        model_address, profile_address: of their pages; "" of a model without one.
    """

    view: DraftView
    summary: str
    command: str
    exports: tuple[TargetExport, ...] = ()
    paste_note: str = ""
    model_address: str = ""
    profile_address: str = ""


async def answer_of(pools: WorkerPools, form: NewPlanForm) -> Answer:
    """Return the answer to a form's question; nothing is stored.

    Raises:
        MoetuneError: a field is wrong, nothing fits, or the profile lacks an operation.
    """
    with form.labelled():
        return await (_model(pools, form) if form.is_model else _layer(pools, form))


async def model_draft(pools: WorkerPools, form: NewPlanForm) -> ModelDraft:
    """Return the draft of a model.

    Raises:
        MoetuneError: as of `answer_of`.
    """
    question = await pools.read(form.model_question)
    planner = pools.planner

    def solve() -> ModelDraft:
        return planner.solver.run(draft_model, question, planner.sources.profile(form.profile))

    return await pools.solve(solve)


async def model_plan(pools: WorkerPools, form: NewPlanForm) -> TrainingPlan:
    """Return the plan of a model, to be written or stored.

    Raises:
        MoetuneError: as of `answer_of`.
    """
    question = await pools.read(form.model_question)
    planner = pools.planner

    def solve() -> TrainingPlan:
        return planner.solver.run(plan_model, question, planner.sources.profile(form.profile))

    return await pools.solve(solve)


async def front_of(pools: WorkerPools, form: NewPlanForm) -> FrontView:
    """Return the front of a model.

    Raises:
        InputError: the form asks for a layer, whose answer has its front.
        MoetuneError: as of `answer_of`.
    """
    if not form.is_model:
        raise InputError("the front of a layer is in its answer", "choose a whole model")
    question = await pools.read(form.model_question)
    planner = pools.planner

    def solve() -> FrontDraft:
        return planner.solver.run(draft_front, question, planner.sources.profile(form.profile))

    with form.labelled():
        return front_view(await pools.solve(solve))


async def _layer(pools: WorkerPools, form: NewPlanForm) -> Answer:
    request, planner = form.layer_request(), pools.planner

    def solve() -> LayerDraft:
        return planner.solver.run(draft_layer, request, planner.sources.profile(form.profile))

    draft = await pools.solve(solve)
    plan = draft.explanation.plan
    pipeline, size = plan.pipeline, format_bytes(device_bytes(plan.memory))
    return Answer(
        view=layer_view(draft),
        summary=(
            f"{format_seconds(plan.predicted.step_seconds)} a step with "
            f"{pipeline.forward_degree} and {pipeline.backward_degree} chunks, {size} a device"
        ),
        command=layer_command(request, profile=plan.inputs.profile),
        model_address=address("models", request.model) if request.model else "",
        profile_address=address("profiles", plan.inputs.profile),
    )


async def _model(pools: WorkerPools, form: NewPlanForm) -> Answer:
    draft = await model_draft(pools, form)
    plan, best = draft.plan, draft.plan.best
    is_pasted = form["decoder"] == PASTED
    size = format_bytes(best.memory.peak_bytes)
    return Answer(
        view=model_view(draft),
        summary=f"{format_seconds(best.step.seconds)} a step, {size} a device",
        command=training_command(
            plan.request,
            profile=plan.profile,
            model=f"{PASTED}/config.json" if is_pasted else form["decoder"],
        ),
        exports=draft.exports,
        model_address="" if is_pasted else address("models", form["decoder"]),
        profile_address=address("profiles", plan.profile),
        paste_note=f"Save the configuration as {PASTED}/config.json first." if is_pasted else "",
    )
