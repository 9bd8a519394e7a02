"""`moetune explain`: why a plan is as it is."""

from typing import Annotated

import typer

from moetune.cli.session import Json, ProfileOption, example, session_of
from moetune.domain.document import encode

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
    from moetune.workflows.explain import explain_found
    from moetune.workflows.files import find_plan
    from moetune.workflows.views.explanation import explanation_sections

    session = session_of(context)
    made = find_plan(plan, stores=session.find_store)
    found = explain_found(made, profile=profile, stores=session.find_store)
    if json:
        document = encode(found)
        del document["profile"]
        session.screen.document({"schema": "moetune.explanation/1", **document})
    else:
        session.screen.answer(explanation_sections(found))
