"""`moetune trace`: a plan's timelines as a file for Perfetto."""

from json import dumps as dump
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import (
    Json,
    Oversubscribe,
    PlanArgument,
    ProfileOption,
    TrainedModelOption,
    example,
    session_of,
)
from moetune.domain.units import format_share

if TYPE_CHECKING:
    from moetune.app.trace import Overlap, Trace

EPILOG = example("moetune trace 3f9c21 --nproc 2 --output step.json")


def trace(
    context: typer.Context,
    plan: PlanArgument,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Also record a real step on this number of ranks."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File of the Chrome trace.")] = Path(
        "trace.json"
    ),
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    oversubscribe: Oversubscribe = False,
    json: Json = False,
) -> None:
    """Write a plan's timelines for Perfetto.

    Of a layer its streams, predicted and with --nproc also recorded; of a whole model the passes of
    every pipeline rank.
    """
    from moetune import config
    from moetune.app.files import find_plan, write_text
    from moetune.app.planner import local_planner
    from moetune.app.trace import recorded_trace

    session = session_of(context)
    environ = config.environment()
    launch = config.launch(environ)
    wanted = find_plan(plan, stores=session.find_store)
    with local_planner(session.settings, profile=profile) as planner:
        if nproc is None and launch is None:
            found: Trace | None = planner.trace(wanted, model=model)
        else:
            found = recorded_trace(
                planner.explain(wanted, model=model),
                num_ranks=nproc, launch=launch, environ=environ, oversubscribe=oversubscribe,
            )  # fmt: skip
    if found is None:
        return
    write_text(output, dump(found.document))
    if json:
        session.screen.document(found.summary(str(output)))
        return
    screen = session.screen
    for name, overlap in (("Predicted", found.predicted), ("Measured", found.measured)):
        if overlap is not None:
            screen.say(f"{name}: {_words(overlap)}")
    for note in found.notes:
        screen.say(note)
    screen.line(f"Written to {output}. Open it in ui.perfetto.dev or chrome://tracing.")


def _words(overlap: "Overlap") -> str:
    forward = format_share(overlap.forward, digits=0)
    backward = format_share(overlap.backward, digits=0)
    return f"{forward} of the communication runs behind computation forward, {backward} backward."
