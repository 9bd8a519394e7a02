"""A plan of either kind, and its reader: of a layer, or of a whole model's training."""

import json
from typing import TypeAlias

from moetune.domain.document import decode, decode_schema, refuse_pointer
from moetune.domain.errors import InputError
from moetune.domain.plan import MAKE_PLAN, READABLE_SCHEMAS, Plan
from moetune.domain.training_document import SCHEMA, TrainingDocument
from moetune.domain.withdrawn import whole_model_refusal, withdrawn_of_moetune

AnyPlan: TypeAlias = Plan | TrainingDocument
"""Lists, comparisons and stores accept both kinds; `as_layer` and `as_model` refuse the other."""


def is_plan_text(text: str) -> bool:
    """Return whether a file's text has the keys of a plan, whole or not."""
    of_layer = ('"schema"', '"pipeline"', '"forward_degree"')
    return SCHEMA in text or all(key in text for key in of_layer)


def plan_from_document(document: object, where: str = "") -> AnyPlan:
    """Return the plan in the plain values of a plan file; errors name the file as `where`.

    Raises:
        InputError: an unknown schema, an id that is not the hash of the inputs, a choice that was
            withdrawn since, or a key or value that `decode` refuses.
    """
    if isinstance(document, dict) and document.get("schema") == SCHEMA:
        plan = decode(TrainingDocument, document, where or "plan")
        if plan.target == "moetune" and (row := withdrawn_of_moetune(plan.layout)):
            raise row.refusal(where or "plan")
        return plan
    try:
        if isinstance(document, dict) and document.get("transformer") is not None:
            raise whole_model_refusal(document.get("inputs"))
        return decode_schema(
            Plan, document, "plan", schemas=READABLE_SCHEMAS,
            hint="make the plan again with this version of moetune",
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{where}: {error.what}" if where else error.what, error.hint) from None


def plan_from_json(text: str | bytes, where: str) -> AnyPlan:
    """Return the plan in a JSON text or in an error's JSON; raises InputError if there is none."""
    refuse_pointer(text, where)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON: {error}", MAKE_PLAN) from None
    except RecursionError:
        raise InputError(f"{where} is not a plan: it is nested too deeply") from None
    if isinstance(document, dict) and isinstance(document.get("plan"), dict):
        document = document["plan"]
    return plan_from_document(document, where)
