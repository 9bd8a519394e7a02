"""Training plans by file or by id, and plans of either kind.

`moetune plan --model … --output FILE` writes the files, and the store keeps what it makes.
"""

import json
from pathlib import Path

from moetune.domain.document import decode, encode
from moetune.domain.errors import InputError
from moetune.domain.pipeline import read_stages
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import (
    SCHEMA,
    AnyPlan,
    TrainingDocument,
    TrainingLayout,
    is_training_document,
    training_from_document,
)
from moetune.workflows.files import (
    find_plan,
    is_plan_path,
    load_plan_file,
    plan_to_json,
    read_text,
)
from moetune.workflows.wiring import StoreFinder

MAKE_ONE = (
    "make one:  moetune plan --model qwen3-30b-a3b --profile h100-x8 --target megatron "
    "--global-batch 256 --seq 4096 --output plan.json"
)


def find_any_plan(wanted: str, *, stores: StoreFinder) -> AnyPlan:
    """Return the plan of a file, or of an id in the store, of whichever kind.

    Args:
        wanted: a file, else an id or its beginning.

    Raises:
        InputError: the file is missing or broken, or no plan or several have such an id.
    """
    if _is_file(wanted):
        path = Path(wanted)
        document = _document(path)
        if is_training_document(document):
            return _training(document, path)
        return load_plan_file(path)
    return _stored(wanted, stores) or find_plan(wanted, stores=stores)


def plan_text(plan: AnyPlan) -> str:
    """Return the JSON text of a plan's file."""
    return plan.text if isinstance(plan, TrainingDocument) else plan_to_json(plan)


def find_training_plan(wanted: str, *, stores: StoreFinder) -> TrainingDocument:
    """Return the training plan of a file, or of an id in the store.

    Raises:
        InputError: there is none, or it is a plan of another kind.
    """
    if _is_file(wanted):
        return training_plan_file(Path(wanted))
    found = _stored(wanted, stores)
    if found is not None:
        return found
    plan = find_plan(wanted, stores=stores)
    raise nothing_to_export(f"plan {plan.id[:6]}")


def training_plan_file(path: Path) -> TrainingDocument:
    """Return the plan in a file, also from the error that a plan without room ends in.

    Raises:
        InputError: the file holds no training plan.
    """
    document = _document(path)
    if document is None:
        raise InputError(f"{path} is not a plan: it is not valid JSON", MAKE_ONE)
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a plan", MAKE_ONE)
    if is_training_document(document):
        return _training(document, path)
    if "pipeline" in document and "inputs" in document:
        raise nothing_to_export(str(path))
    schema = document.get("schema")
    what = "no schema" if schema is None else f"schema {schema!r}"
    raise InputError(f"{path} is not a training plan: it has {what}, not {SCHEMA!r}", MAKE_ONE)


def _stored(wanted: str, stores: StoreFinder) -> TrainingDocument | None:
    with stores() as store:
        return store.training_plan(wanted) if store and wanted else None


def _is_file(wanted: str) -> bool:
    return is_plan_path(wanted) or Path(wanted).is_file()


def _document(path: Path) -> object:
    """Return a file's JSON, of an error that has a plan that plan; None where it is no JSON."""
    try:
        found = json.loads(read_text(path, "plan"))
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("plan"), dict):
        return found["plan"]
    return found


def _training(document: object, path: Path) -> TrainingDocument:
    try:
        return training_from_document(document, str(path))
    except InputError as error:
        raise InputError(error.what, error.hint or MAKE_ONE) from None


def nothing_to_export(what: str) -> InputError:
    """Return the error for a plan that no other runtime reads.

    Args:
        what: the plan is called.
    """
    return InputError(
        f"{what} is the plan of a layer or of a paper's model, which has nothing to export",
        f"moetune.open_planbook reads it as it is; for a layout, {MAKE_ONE}",
    )


def folded_layout(layout: TrainingLayout) -> FoldedLayout:
    """Return the layout in a plan's document.

    Raises:
        InputError: a module or a letter is unknown.
    """
    same = (
        "dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch", "dispatcher", "overlap", "zero",
        "cuda_graphs", "offload_activations", "offload_optimizer", "schedule", "degree",
    )  # fmt: skip
    recompute = () if layout.recompute == ("none",) else layout.recompute
    stages = None if layout.stages is None else read_stages(layout.stages)
    return decode(
        FoldedLayout,
        {name: encode(getattr(layout, name)) for name in same}
        | {"recompute": recompute, "stages": stages},
        "layout",
    )
