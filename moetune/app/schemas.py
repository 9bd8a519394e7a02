"""JSON schemas of documents, by name, as files; answers of one line of facts have none.

`python -m tests.schemas` writes the files from the classes of the documents.
"""

from pathlib import Path

from moetune.domain.errors import NotFoundError
from moetune.domain.spelling import nearest_or

_PACKAGE = Path(__file__).resolve().parents[1]


def schema_files() -> dict[str, Path]:
    """Return the files of the schemas by name, from the package or the checkout."""
    for folder in (_PACKAGE / "_schemas", _PACKAGE.parent / "docs" / "schemas"):
        if folder.is_dir():
            return dict(sorted((file.stem, file) for file in folder.glob("*.json")))
    return {}


def schema_text(name: str) -> str:
    """Return a document's JSON schema, as it is published: indented, with a line end.

    Raises:
        NotFoundError: no schema has this name; the hint lists those there are.
    """
    files = schema_files()
    if name not in files:
        hint = nearest_or(f"use one of {', '.join(files)}", name, files)
        raise NotFoundError(f"no schema is named {name!r}", hint)
    return files[name].read_text(encoding="utf-8")
