"""Files of training plans, as `moetune plan --model … --output FILE` writes them."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.pipeline import read_stages
from moetune.domain.training import FoldedLayout
from moetune.workflows.files import read_text
from moetune.workflows.training import SCHEMA

MAKE_ONE = (
    "make one:  moetune plan --model qwen3-30b-a3b --profile h100-x8 --target megatron "
    "--global-batch 256 --seq 4096 --output plan.json"
)

_LATER = ("schedule", "stages", "degree", "dispatcher_sms")


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


def mapping_of(document: Mapping[str, object], key: str, path: Path) -> dict[str, object]:
    """Return a part of the document.

    Raises:
        InputError: the part is missing.
    """
    found = document.get(key)
    if not isinstance(found, dict):
        raise InputError(f"{path}: {key} is missing", MAKE_ONE)
    return found


def read_planned_layout(plain: Mapping[str, object], path: Path) -> FoldedLayout:
    """Return the layout in a plan's document.

    Raises:
        InputError: a size is missing, or wrong.
    """
    rest = {key: value for key, value in plain.items() if key != "edp"}
    rest.setdefault("cuda_graphs", "none")
    rest.setdefault("offload_activations", 0.0)
    rest.setdefault("offload_optimizer", 0.0)
    for name in _LATER:  # plans from before them have what None stands for
        rest.setdefault(name, None)
    if isinstance(rest["stages"], str):
        rest["stages"] = list(read_stages(rest["stages"]))
    missing = [item.name for item in fields(FoldedLayout) if item.name not in rest]
    if missing:  # their defaults would be another layout than the planned one
        raise InputError(f"{path}: layout lacks {', '.join(missing)}", MAKE_ONE)
    if rest.get("recompute") == ["none"]:
        rest["recompute"] = []
    return decode(FoldedLayout, rest, f"{path}: layout")
