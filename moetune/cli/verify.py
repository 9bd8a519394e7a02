"""`moetune verify`: a plan's predictions against real steps of its layer on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import (
    Json,
    Oversubscribe,
    PlanArgument,
    ProfileOption,
    Session,
    example,
    session_of,
)
from moetune.domain.errors import QualityError

if TYPE_CHECKING:
    from moetune.app.verify import Verification
    from moetune.domain.plan import Plan

EPILOG = example("moetune verify 3f9c21 --nproc 2")


def verify(
    context: typer.Context,
    plan: PlanArgument,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks to start. Default: the plan's."),
    ] = None,
    profile: ProfileOption = None,
    *,
    oversubscribe: Oversubscribe = False,
    json: Json = False,
) -> None:
    """Run a plan's layer and compare its times.

    Runs every degree, and compares outputs and gradients with those of one chunk. Exit code 6:
    the step is outside of its range, or one chunk is faster.
    """
    from moetune import config
    from moetune.app.planner import local_planner
    from moetune.app.staleness import stale_note
    from moetune.app.verify import verify_plan
    from moetune.app.views.observed import verification_sections

    session = session_of(context)
    environ = config.environment()
    with local_planner(session.settings, profile=profile) as planner:
        made = planner.sources.plan(plan).as_layer()
        known = planner.explain(made).profile
    found = verify_plan(
        made, profile=known, num_ranks=nproc, launch=config.launch(environ), environ=environ,
        oversubscribe=oversubscribe,
    )  # fmt: skip
    if found is None:
        return
    stale = "" if known is None else stale_note(known)
    notes = (*_store(session, made, found), *filter(None, (stale,)))
    session.screen.answer(verification_sections(made, found), found.document, as_json=json)
    for note in notes:
        session.screen.note(note)
    _judge(session, made, found, as_json=json)


def _judge(session: Session, made: "Plan", found: "Verification", *, as_json: bool) -> None:
    """Say in a sentence whether the plan holds.

    Raises:
        QualityError: it does not.
    """
    from moetune.app.views.observed import verdict

    words, hint = verdict(made, found), "measure again, for longer:  moetune profile"
    if not found.is_equal:
        hint = "this is a defect of moetune: report it with the output above"
    if found.holds:
        session.screen.note(words) if as_json else session.screen.line(words)
    elif as_json:
        session.screen.note(words)
        raise typer.Exit(QualityError.exit_code)  # one document is enough
    else:
        raise QualityError(words, hint)


def _store(session: Session, made: "Plan", found: "Verification") -> tuple[str, ...]:
    """Store what was observed, and return the newest change among all observations."""
    from moetune.app import wiring
    from moetune.app.drift import observed_drifts
    from moetune.app.verify import observations_of

    observations = observations_of(made, found)
    with wiring.open_store(session.settings) as store:
        store.save_plan(made)
        store.add_observations(observations)
        changes = observed_drifts(store.observation_page(made.id, limit=1000))
    return tuple(one.words for one in changes[:1])
