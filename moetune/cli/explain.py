"""`moetune explain`: the reasons of a plan."""

from pathlib import Path

import typer

from moetune.cli.session import All, Json, PlanArgument, ProfileOption, example, session_of

EPILOG = example("moetune explain 3f9c21")


def explain(
    context: typer.Context,
    plan: PlanArgument,
    profile: ProfileOption = None,
    *,
    all_: All = False,
    json: Json = False,
) -> None:
    """Explain a plan's choice and its times.

    Shows the terms, the alternatives that lost, other batch sizes, and the uncertainty. Of a
    Hugging Face model's plan: where its step and its memory go, and why the next layouts lost.
    """
    from moetune.workflows.planner import local_planner
    from moetune.workflows.training_files import is_training_plan
    from moetune.workflows.views.explanation import explanation_sections
    from moetune.workflows.views.training_explanation import (
        explain_training,
        training_explanation_sections,
    )

    session = session_of(context, all_rows=all_)
    if Path(plan).is_file() and is_training_plan(Path(plan)):
        why = explain_training(Path(plan))
        if json:
            session.screen.document(why.document)
        else:
            session.screen.answer(training_explanation_sections(why))
        return
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.explain(plan)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(explanation_sections(found))
