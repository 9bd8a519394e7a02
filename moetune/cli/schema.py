"""`moetune schema`: the JSON schemas of documents."""

from moetune.cli.commands import argument, command
from moetune.cli.session import Session


@command(
    "moetune schema plan",
    argument("name", "A document. Default: list their names.", required=False),
)
def schema(session: Session, name: str | None) -> None:
    """Print the JSON schema of a document, or list their names."""
    from moetune.app.schemas import schema_files, schema_text

    if name is None:
        names = [*schema_files()]
        session.screen.result({"schema": "moetune.schemas/1", "names": names}, *names)
    else:
        session.screen.raw(schema_text(name))
