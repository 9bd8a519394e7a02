"""`moetune config`: the settings that apply in this folder."""

from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.document import encode
from moetune.report.section import Cell, Table

app = typer.Typer(help="The settings that apply in this folder.", rich_markup_mode=None)


@app.callback()  # without it typer drops the name of an only command
def _config() -> None:
    """The settings that apply in this folder."""


@app.command("show", epilog=example("moetune config show --origin"))
def show(
    context: typer.Context,
    *,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show the source of each value.")
    ] = False,
    json: Json = False,
) -> None:
    """Show every setting that applies in this folder."""
    from moetune.config import without_password

    session = session_of(context)
    found = session.configuration()
    settings = encode(found.settings)
    settings["db"] = without_password(settings["db"])
    if json:
        document = {"schema": "moetune.config/1", "settings": settings}
        session.screen.document({**document, "origins": found.origins} if origin else document)
        return
    rows = [(name, _shown(value), found.origins[name]) for name, value in settings.items()]
    columns = 3 if origin else 2
    header = ("setting", "value", "from")[:columns]
    cells = tuple(tuple(map(Cell.words, row[:columns])) for row in rows)
    session.screen.table(Table(name="settings", header=header, rows=cells), indent=0)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "—" if value is None else str(value)
