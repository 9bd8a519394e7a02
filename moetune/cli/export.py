"""`moetune export`: a training plan as what a runtime reads."""

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.targets import TARGETS

EPILOG = example("moetune export plan.json --to megatron --output layout.sh")


def export(
    context: typer.Context,
    plan: Annotated[
        Path,
        typer.Argument(help="File that `moetune plan --output` wrote for a Hugging Face model."),
    ],
    to: Annotated[str, typer.Option("--to", metavar=f"[{'|'.join(TARGETS)}]", help="The runtime.")],
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
    from moetune.workflows.export import export_plan
    from moetune.workflows.files import write_text

    session = session_of(context)
    screen = session.screen
    found = export_plan(plan, to=to, model=model, stores=session.find_store)
    export = found.export
    if output is not None:
        write_text(output, export.text)
    if json:
        screen.document(found.document)
    elif output is None:
        typer.echo(export.text, nl=False)
    else:
        screen.line(f"Written to {output}, for {found.target.name} ({found.target.version}).")
    if not json:
        for one in export.not_expressed:
            screen.note(f"Not expressed: {one}.")
        screen.note(f"Launch (file name {export.file_name}):  {export.launch}")
