"""`moetune sensitivity`: what a plan's step follows."""

import typer

from moetune.cli.session import (
    Json,
    PlanArgument,
    ProfileOption,
    TrainedModelOption,
    example,
    session_of,
)

EPILOG = example("moetune sensitivity 3f9c21")


def sensitivity(
    context: typer.Context,
    plan: PlanArgument,
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    json: Json = False,
) -> None:
    """Say which part of the machine and which decision a plan's step follows.

    Each part is made 1 % slower and faster with the plan's choice held fixed; each decision is
    moved to its neighbours. Nothing is stored.
    """
    from moetune.app.files import find_plan
    from moetune.app.planner import local_planner
    from moetune.app.views.sensitivity import sensitivity_sections

    session = session_of(context)
    wanted = find_plan(plan, stores=session.find_store)
    with local_planner(session.settings, profile=profile) as planner:
        found = planner.sensitivity(wanted, model=model)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(sensitivity_sections(found))
