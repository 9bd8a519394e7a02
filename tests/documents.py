"""Every document that a test reads is held against its published JSON schema."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "schemas"


@cache
def _validator(name: str) -> Any:
    return jsonschema_rs.validator_for(json.loads((PUBLISHED / f"{name}.json").read_text()))


def check_document(document: Any) -> None:
    """Raise where a document has another form than its published schema, where it has one."""
    tag = document.get("schema") if isinstance(document, dict) else None
    if isinstance(tag, str) and tag.startswith("moetune."):
        name = tag.removeprefix("moetune.").partition("/")[0]
        if (PUBLISHED / f"{name}.json").exists():
            _validator(name).validate(document)


def read_document(text: str) -> Any:
    """Return the document of a text, which has the form that its schema says."""
    document = json.loads(text)
    check_document(document)
    return document
