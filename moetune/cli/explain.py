"""`moetune explain`: why a plan is as it is."""

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
    """Say why a plan is as it is: terms, what lost, other sizes, and how sure it is."""
    from moetune.cli.explain_view import show_explanation
    from moetune.workflows.planner import local_planner

    session = session_of(context)
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.explain(plan)
    if json:
        session.screen.document(found.document)
    else:
        show_explanation(session.screen, found)
