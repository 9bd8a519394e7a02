"""`moetune explain`: the reasons of a plan."""

from typing import Annotated

import typer

from moetune.cli.session import Json, ProfileOption, example, session_of

EPILOG = example("moetune explain 3f9c21")


def explain(
    context: typer.Context,
    plan: Annotated[
        str, typer.Argument(help="A plan's JSON file, or the beginning of an id in the store.")
    ],
    profile: ProfileOption = None,
    *,
    json: Json = False,
) -> None:
    """Explain a plan: its terms, its alternatives, other batch sizes, and its uncertainty."""
    from moetune.workflows.planner import local_planner
    from moetune.workflows.views.explanation import explanation_sections

    session = session_of(context)
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.explain(plan)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(explanation_sections(found))
