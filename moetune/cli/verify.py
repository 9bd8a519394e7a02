"""`moetune verify`: what a plan predicted against what its layer does here."""

from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import Json, ProfileOption, Session, example, session_of
from moetune.domain.errors import QualityError
from moetune.domain.units import format_seconds

if TYPE_CHECKING:
    from moetune.cli.render import Screen
    from moetune.domain.plan import Plan
    from moetune.workflows.verify import Verification

EPILOG = example("moetune verify 3f9c21 --nproc 2")

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks to start here. Default: those of the plan."),
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
    """Run the plan's layer at every degree: equal numbers, predicted against measured."""
    from moetune import config
    from moetune.workflows.planner import local_planner
    from moetune.workflows.verify import verify_plan

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
    _keep(session, made, found)
    if json:
        session.screen.document(found.document)
    else:
        _show(session.screen, made, found)
    if not found.is_equal:
        raise QualityError(
            f"chunks changed the numbers of plan {made.id[:6]} by more than {found.tolerance:g}",
            "this is a defect of moetune: report it with the output above",
        )


def _keep(session: Session, made: "Plan", found: "Verification") -> None:
    from moetune.workflows import wiring
    from moetune.workflows.verify import observations_of

    with wiring.open_store(session.settings) as store:
        store.save_plan(made)
        for observation in observations_of(made, found):
            store.add_observation(observation)


def _show(screen: "Screen", made: "Plan", found: "Verification") -> None:
    planned, one = found.planned, found.one_chunk
    screen.say(
        f"Plan {made.id[:6]} takes {format_seconds(planned.step_seconds)} a step here, "
        f"{one.step_seconds / planned.step_seconds:.2f} × as fast as one chunk. "
        f"{_expected(planned.predicted_seconds, planned.error)} "
        f"{_best(found)}"
    )
    screen.say()
    screen.table(
        ("", "strategy", "forward", "backward", "predicted", "measured", "error"),
        (
            (
                "plan" if step.is_planned else "",
                step.strategy,
                str(step.forward_degree),
                str(step.backward_degree),
                "–" if step.predicted_seconds is None else format_seconds(step.predicted_seconds),
                format_seconds(step.step_seconds),
                "–" if step.error is None else f"{step.error:+.1%}",
            )
            for step in found.steps
        ),
        right=range(2, 7),
    )
    screen.say()
    deviation = max(step.deviation for step in found.steps)
    screen.say(
        f"Numbers: equal to one chunk within {deviation:.1e}. "
        f"The busiest rank had {found.imbalance:.2f} × the mean rows."
    )


def _expected(predicted_seconds: float | None, error: float | None) -> str:
    if predicted_seconds is None or error is None:
        return "Its profile is not here, so nothing was predicted for other degrees."
    return f"Predicted were {format_seconds(predicted_seconds)} ({error:+.1%})."


def _best(found: "Verification") -> str:
    fastest, planned = found.fastest, found.planned
    if fastest is planned:
        return "No other degree was faster."
    gap = planned.step_seconds / fastest.step_seconds - 1
    return (
        f"The fastest was {fastest.forward_degree} and {fastest.backward_degree} chunks, "
        f"by {gap:.1%}."
    )
