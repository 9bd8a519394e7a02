"""`moetune explain`: the reasons of a plan, and why it is not another choice."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import (
    All,
    Json,
    PlanArgument,
    ProfileOption,
    Session,
    TrainedModelOption,
    example,
    refuse_model,
    session_of,
)
from moetune.domain.spelling import AS_FLAGS

if TYPE_CHECKING:
    from moetune.domain.training_document import TrainingDocument
    from moetune.workflows.compared import WhyNotAnswer

EPILOG = example("moetune explain 3f9c21 --degree 8")


def explain(
    context: typer.Context,
    plan: PlanArgument,
    degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks, forward and backward?")
    ] = None,
    forward_degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks forward?")
    ] = None,
    backward_degree: Annotated[
        int | None, typer.Option(min=1, help="Why not so many chunks backward?")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="Why not keep activations that way: none, S1, S2, S3 or S4?"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Why not this layout of a whole model: tp=2,pp=4, or as a plan prints it?",
        ),
    ] = None,
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    all_: All = False,
    json: Json = False,
) -> None:
    """Explain a plan's choice and its times, or why it is not another one.

    Shows the terms, the alternatives that lost, other batch sizes, and the uncertainty. Of a
    Hugging Face model's plan: where its step and its memory go, and why the next layouts lost.
    With another choice: by how much it is slower, of what, and whether it fits and is allowed.
    """
    from moetune.domain.training_document import TrainingDocument
    from moetune.workflows.files import find_plan
    from moetune.workflows.open_planner import local_planner
    from moetune.workflows.views.explanation import explanation_sections
    from moetune.workflows.why_not import WhyNot

    session = session_of(context, all_rows=all_)
    question = WhyNot(
        degree=degree, forward_degree=forward_degree, backward_degree=backward_degree,
        strategy=strategy, layout=layout,
        spelling=replace(AS_FLAGS, names={**AS_FLAGS.names, "layout": "--layout"}),
    )  # fmt: skip
    wanted = find_plan(plan, stores=session.find_store)
    if not isinstance(wanted, TrainingDocument):
        refuse_model(model)
    elif not question.is_asked:
        _explain_training(session, wanted, as_json=json)
        return
    with local_planner(session.settings, profile=profile) as planner:
        if question.is_asked or isinstance(wanted, TrainingDocument):
            _show(session, planner.why_not(wanted, question, model=model), as_json=json)
            return
        found = planner.explain_plan(wanted)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(explanation_sections(found))


def _explain_training(session: Session, plan: "TrainingDocument", *, as_json: bool) -> None:
    """Explain the plan of a Hugging Face model's training."""
    from moetune.workflows.views.training_explanation import (
        TrainingExplanation,
        training_explanation_sections,
    )

    why = TrainingExplanation(plan=plan)
    if as_json:
        session.screen.document(why.document)
    else:
        session.screen.answer(training_explanation_sections(why))


def _show(session: Session, answer: "WhyNotAnswer", *, as_json: bool) -> None:
    from moetune.workflows.views.why_not import why_not_sections

    if as_json:
        session.screen.document(answer.document)
    else:
        session.screen.answer(why_not_sections(answer))
