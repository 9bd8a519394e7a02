"""`moetune schema`: the JSON schemas of documents."""

from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of

EPILOG = example("moetune schema plan")


def schema(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A document. Default: list their names.")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Print the JSON schema of a document, or list their names."""
    from moetune.app.schemas import SCHEMAS, schema_text

    screen = session_of(context).screen
    if name is not None:
        typer.echo(schema_text(name), nl=False)
    elif json:
        screen.document({"schema": "moetune.schemas/1", "names": [*SCHEMAS]})
    else:
        for one in SCHEMAS:
            screen.line(one)
