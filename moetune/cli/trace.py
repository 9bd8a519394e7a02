"""`moetune trace`: a plan's timelines as a file for Perfetto."""

from json import dumps as dump
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import Json, ProfileOption, example, session_of
from moetune.domain.document import encode
from moetune.domain.errors import ProfileError

if TYPE_CHECKING:
    from moetune.workflows.trace import Overlap

EPILOG = example("moetune trace 3f9c21 --nproc 2 --output step.json")


def trace(
    context: typer.Context,
    plan: Annotated[
        str, typer.Argument(help="A plan's JSON file, or the beginning of an id in the store.")
    ],
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Also run a step on so many ranks and record it."),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the Chrome trace goes.")
    ] = Path("trace.json"),
    profile: ProfileOption = None,
    *,
    json: Json = False,
) -> None:
    """Write predicted and measured timelines of a plan for ui.perfetto.dev."""
    from moetune import config
    from moetune.workflows.files import find_plan, write_text
    from moetune.workflows.trace import trace_plan
    from moetune.workflows.verify import profile_behind

    session = session_of(context)
    environ = config.environment()
    made = find_plan(plan, stores=session.find_store)
    known = profile_behind(made, wanted=profile, stores=session.find_store)
    launch = config.launch(environ)
    is_real = nproc is not None or launch is not None
    if known is None and not is_real and made.transformer is None:
        raise ProfileError(
            f"the profile of plan {made.id[:6]} is gone or has changed: nothing to draw",
            "name it with --profile, or record a real step with --nproc",
        )
    found = trace_plan(made, profile=known, num_ranks=nproc, launch=launch, environ=environ)
    if found is None:
        return
    document = {"traceEvents": list(found.events), "displayTimeUnit": "ms"}
    write_text(output, dump(document))
    if json:
        session.screen.document(
            {
                "schema": "moetune.trace/1",
                "file": str(output),
                "predicted": encode(found.predicted),
                "measured": encode(found.measured),
            }
        )
        return
    screen = session.screen
    for name, overlap in (("Predicted", found.predicted), ("Measured", found.measured)):
        if overlap is not None:
            screen.say(f"{name}: {_words(overlap)}")
    screen.line(f"Written to {output}. Look at it in ui.perfetto.dev or chrome://tracing.")


def _words(overlap: "Overlap") -> str:
    return (
        f"{overlap.forward:.0%} of the communication runs behind computation forward, "
        f"{overlap.backward:.0%} backward."
    )
