"""`moetune schema`: the JSON schemas of documents; answers with a single line have none.

`python -m tests.schemas` writes the files from the classes of the documents.
"""

from pathlib import Path

from moetune.cli.commands import argument, command
from moetune.cli.session import Session
from moetune.domain.errors import NotFoundError
from moetune.domain.spelling import nearest_or

_PACKAGE = Path(__file__).resolve().parents[1]


@command(
    "moetune schema plan",
    argument("name", "A document. Default: list their names.", required=False),
)
def schema(session: Session, name: str | None) -> None:
    """Print the JSON schema of a document, or list their names."""
    folders = (_PACKAGE / "_schemas", _PACKAGE.parent / "docs" / "schemas")  # or the checkout's
    folder = next(filter(Path.is_dir, folders), folders[0])
    files = dict(sorted((file.stem, file) for file in folder.glob("*.json")))
    if name is None:
        names = [*files]
        session.screen.result({"schema": "moetune.schemas/1", "names": names}, *names)
        return
    if name not in files:
        hint = nearest_or(f"use one of {', '.join(files)}", name, files)
        raise NotFoundError(f"no schema is named {name!r}", hint)
    session.screen.raw(files[name].read_text(encoding="utf-8"))
