"""`moetune explain`: the reasons of a plan."""

import typer

from moetune.cli.session import Json, PlanArgument, ProfileOption, example, session_of

EPILOG = example("moetune explain 3f9c21")


def explain(
    context: typer.Context,
    plan: PlanArgument,
    profile: ProfileOption = None,
    *,
    json: Json = False,
) -> None:
    """Explain a plan's choice and its times.

    Shows the terms, the alternatives that lost, other batch sizes, and the uncertainty. Of a
    Hugging Face model's plan: where its step and its memory go, and why the next layouts lost.
    """
    from moetune.domain.training_document import TrainingDocument
    from moetune.workflows.planner import local_planner
    from moetune.workflows.training_files import find_any_plan
    from moetune.workflows.views.explanation import explanation_sections
    from moetune.workflows.views.training_explanation import (
        explain_training,
        training_explanation_sections,
    )

    session = session_of(context)
    wanted = find_any_plan(plan, stores=session.find_store)
    if isinstance(wanted, TrainingDocument):
        why = explain_training(wanted)
        if json:
            session.screen.document(why.document)
        else:
            session.screen.answer(training_explanation_sections(why))
        return
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.explain_plan(wanted)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(explanation_sections(found))
