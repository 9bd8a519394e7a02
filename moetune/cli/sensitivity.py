"""`moetune sensitivity`: what a plan's step follows."""

from functools import partial
from pathlib import Path

import typer

from moetune.cli.session import (
    Json,
    PlanArgument,
    ProfileOption,
    TrainedModelOption,
    example,
    refuse_model,
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

    Each part is made 1 % slower and faster with the plan's choice held fixed, then up to twice
    and half its time until another choice is best; each decision is moved to its neighbours.
    Nothing is stored.
    """
    from moetune.workflows import wiring
    from moetune.workflows.planner import local_planner
    from moetune.workflows.training_files import is_training_plan
    from moetune.workflows.training_sensitivity import training_sensitivity
    from moetune.workflows.views.sensitivity import sensitivity_sections

    session = session_of(context)
    if Path(plan).is_file() and is_training_plan(Path(plan)):
        stores = partial(wiring.find_store, session.settings)
        found = training_sensitivity(Path(plan), profile=profile, model=model, stores=stores)
    else:
        refuse_model(model)
        with local_planner(session.settings, profile=profile) as planner:
            found = planner.sensitivity(plan)
    if json:
        session.screen.document(found.document)
    else:
        session.screen.answer(sensitivity_sections(found))
