"""`moetune export`: a training plan as what a runtime reads."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.session import Json, PlanArgument, example, session_of
from moetune.domain.spelling import about
from moetune.domain.targets import TARGETS

EPILOG = example("moetune export plan.json --output layout.sh")


def export(
    context: typer.Context,
    plan: PlanArgument,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--to",
            metavar="TARGET",
            help=f"{', '.join(TARGETS)}; or with a version: megatron@0.17. "
            "Default: the plan's own.",
        ),
    ] = None,
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
    from moetune.app.export import export_plan
    from moetune.app.files import find_plan, write_text
    from moetune.domain.targets import find_target

    session = session_of(context)
    screen = session.screen
    stores = session.find_store
    with about("target"):
        find_target(target or TARGETS[0])  # before the plan, which may be far away
    made = find_plan(plan, stores=stores).as_model()
    found = export_plan(made, to=target or made.target, model=model, stores=stores)
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
