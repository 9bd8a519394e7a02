"""Files of training plans, as `moetune plan --model … --output FILE` writes them."""

import json
from collections.abc import Mapping
from pathlib import Path

from moetune.domain.errors import InputError
from moetune.workflows.files import read_text
from moetune.workflows.training import SCHEMA

MAKE_ONE = (
    "make one:  moetune plan --model qwen3-30b-a3b --profile h100-x8 --target megatron "
    "--global-batch 256 --seq 4096 --output plan.json"
)


def is_training_plan(path: Path) -> bool:
    """Return whether the file holds a training plan, or the error that has one."""
    try:
        found = json.loads(read_text(path, "plan"))
    except (InputError, ValueError, RecursionError):
        return False
    if isinstance(found, dict) and isinstance(found.get("plan"), dict):
        found = found["plan"]
    return isinstance(found, dict) and found.get("schema") == SCHEMA


def training_document(path: Path) -> Mapping[str, object]:
    """Return a plan file's document, also from the error that a plan without room ends in.

    Raises:
        InputError: the file holds no training plan.
    """
    try:
        found = json.loads(read_text(path, "plan"))
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a plan: it is not valid JSON", MAKE_ONE) from None
    return check_training(found, path)


def check_training(found: object, path: Path | str) -> Mapping[str, object]:
    """Return plain values if they are a training plan, or the plan in an error that has one.

    Args:
        path: of the file, or what an error calls the plan.

    Raises:
        InputError: they are no training plan.
    """
    if isinstance(found, dict) and isinstance(found.get("plan"), dict):
        found = found["plan"]
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a plan", MAKE_ONE)
    schema = found.get("schema")
    if schema == SCHEMA:
        return found
    if "pipeline" in found and "inputs" in found:
        raise InputError(
            f"{path} is the plan of a layer or of a paper's model, which has nothing to export",
            f"moetune.open_planbook reads it as it is; for a layout, {MAKE_ONE}",
        )
    what = "no schema" if schema is None else f"schema {schema!r}"
    raise InputError(f"{path} is not a training plan: it has {what}, not {SCHEMA!r}", MAKE_ONE)


def mapping_of(document: Mapping[str, object], key: str, path: Path | str) -> dict[str, object]:
    """Return a part of the document.

    Raises:
        InputError: the part is missing.
    """
    found = document.get(key)
    if not isinstance(found, dict):
        raise InputError(f"{path}: {key} is missing", MAKE_ONE)
    return found
