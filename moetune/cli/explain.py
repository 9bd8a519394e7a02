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

    Shows the terms, the alternatives that lost, other batch sizes, and the uncertainty.
    """
    from moetune.workflows.planner import local_planner
    from moetune.workflows.views.explanation import explanation_sections

    session = session_of(context)
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.explain(plan)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(explanation_sections(found))
