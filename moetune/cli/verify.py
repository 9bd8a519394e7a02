"""`moetune verify`: a plan's predictions against real steps of its layer on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import Json, ProfileOption, Session, example, session_of
from moetune.domain.errors import QualityError

if TYPE_CHECKING:
    from moetune.domain.plan import Plan
    from moetune.workflows.verify import Verification

EPILOG = example("moetune verify 3f9c21 --nproc 2")

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks to start. Default: the plan's."),
]


def verify(
    context: typer.Context,
    plan: Annotated[
        str, typer.Argument(help="A plan's JSON file, or the beginning of an id in the store.")
    ],
    nproc: Nproc = None,
    profile: ProfileOption = None,
    *,
    json: Json = False,
) -> None:
    """Run the plan's layer at every degree; compare its numbers and its times."""
    from moetune import config
    from moetune.workflows.planner import local_planner
    from moetune.workflows.verify import verify_plan
    from moetune.workflows.views.observed import verification_sections

    session = session_of(context)
    environ = config.environment()
    with local_planner(session.settings, profile=profile) as planner:
        made = planner.plan(plan)
        known = planner.profile_if_known(made)
    found = verify_plan(
        made, profile=known, num_ranks=nproc, launch=config.launch(environ), environ=environ
    )
    if found is None:
        return
    _store(session, made, found)
    session.screen.answer(verification_sections(made, found), found.document, as_json=json)
    if not found.is_equal:
        raise QualityError(
            f"chunks changed the numbers of plan {made.id[:6]} by more than {found.tolerance:g}",
            "this is a defect of moetune: report it with the output above",
        )


def _store(session: Session, made: "Plan", found: "Verification") -> None:
    from moetune.workflows import wiring
    from moetune.workflows.verify import observations_of

    with wiring.open_store(session.settings) as store:
        store.save_plan(made)
        for observation in observations_of(made, found):
            store.add_observation(observation)
