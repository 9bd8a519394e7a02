"""`moetune verify`: a plan's predictions against real steps of its layer on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import Json, PlanArgument, ProfileOption, Session, example, session_of
from moetune.domain.errors import QualityError

if TYPE_CHECKING:
    from moetune.domain.plan import Plan
    from moetune.workflows.verify import Verification

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
    json: Json = False,
) -> None:
    """Run a plan's layer and compare its times.

    Runs every degree, and compares outputs and gradients with those of one chunk.
    """
    from moetune import config
    from moetune.workflows.planner import local_planner
    from moetune.workflows.staleness import stale_note
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
    stale = "" if known is None else stale_note(known)
    notes = (*_store(session, made, found), *filter(None, (stale,)))
    session.screen.answer(verification_sections(made, found), found.document, as_json=json)
    for note in notes:
        session.screen.note(note)
    if not found.is_equal:
        raise QualityError(
            f"chunks changed the numbers of plan {made.id[:6]} by more than {found.tolerance:g}",
            "this is a defect of moetune: report it with the output above",
        )


def _store(session: Session, made: "Plan", found: "Verification") -> tuple[str, ...]:
    """Store what was observed, and return what it changes for the next plan."""
    from moetune.domain.corrections import corrections_words
    from moetune.workflows import wiring
    from moetune.workflows.corrections import update_corrections
    from moetune.workflows.drift import observed_drifts
    from moetune.workflows.verify import observations_of

    observations = observations_of(made, found)
    with wiring.open_store(session.settings) as store:
        store.save_plan(made)
        store.add_observations(observations)
        changes = observed_drifts(store.observation_page(made.id, limit=1000))
        corrected = update_corrections(store, made.inputs.profile) if observations else None
    notes = [one.words for one in changes[:1]]
    if corrected is not None:
        notes += corrected.refused[:1]
        for reason in (*corrected.refused[1:], *corrected.waiting):
            session.screen.detail(reason)
        if corrected.is_changed:
            known = "; ".join(corrections_words(corrected.corrections)) or "what was measured"
            notes.append(f"the next plan of profile {made.inputs.profile!r} takes {known}")
    return tuple(notes)
