"""`moetune export`: a training plan as what a runtime reads."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.session import Json, PlanArgument, example, session_of
from moetune.domain.targets import TARGETS

EPILOG = example("moetune export plan.json --to megatron --output layout.sh")


def export(
    context: typer.Context,
    plan: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar=f"[{'|'.join(TARGETS)}]",
            help="The runtime, with a version or without: megatron@0.17.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The config.json of a plan whose model has no name."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file. Default: stdout.")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Write a training plan as arguments, a configuration or a function of a runtime."""
    from moetune.domain.targets import find_target
    from moetune.workflows.export import export_plan
    from moetune.workflows.files import find_plan, write_text

    session = session_of(context)
    screen = session.screen
    stores = session.find_store
    find_target(to)  # before the plan, which may be far away
    found = export_plan(
        find_plan(plan, stores=stores).as_model(), to=to, model=model, stores=stores
    )
    export = found.export
    if output is not None:
        write_text(output, export.text)
    if json:
        screen.document(found.document)
    elif output is None:
        typer.echo(export.text, nl=False)
    else:
        screen.line(f"Written to {output}, for {found.target.label}.")
    if not json:
        for one in export.not_expressed:
            screen.note(f"Not expressed: {one}.")
        if output is not None and export.file_name in export.launch:
            written = shlex.quote(str(output))
            screen.note(f"Launch:  {export.launch.replace(export.file_name, written)}")
        else:
            screen.note(f"Launch (file name {export.file_name}):  {export.launch}")
