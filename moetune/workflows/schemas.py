"""JSON schemas of documents, by name; answers of one line of facts have none."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from moetune.domain.document import ErrorDocument
from moetune.domain.errors import NotFoundError
from moetune.domain.json_schema import schema_of
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.routing_record import ModelRoutingRecord, RoutingRecord
from moetune.domain.spelling import nearest_or
from moetune.domain.training_document import TrainingDocument
from moetune.workflows.answer_schemas import ANSWERS
from moetune.workflows.compared import (
    WHY_NOT_SCHEMA,
    ComparedVerdict,
    StepDifference,
    WhyNotAnswer,
)
from moetune.workflows.doctor import DOCTOR_SCHEMA, Diagnosis
from moetune.workflows.export import ExportDocument
from moetune.workflows.sensitivity import SENSITIVITY_SCHEMA, Sensitivity
from moetune.workflows.verify import VERIFICATION_SCHEMA, Verification

_VERDICTS = MappingProxyType({"is_equal": bool, "is_inside": bool, "has_lost": bool})
_WORDS = tuple[str, ...]
_COMPARISON = MappingProxyType(
    {"verdict": ComparedVerdict, "difference": StepDifference | None, "words": _WORDS}
)
_OF_CLASSES: Mapping[str, Callable[[], dict[str, object]]] = MappingProxyType(
    {
        "doctor": partial(schema_of, Diagnosis, tag=DOCTOR_SCHEMA),
        "error": partial(schema_of, ErrorDocument),
        "export": partial(schema_of, ExportDocument),
        "model-routing": partial(schema_of, ModelRoutingRecord),
        "plan": partial(schema_of, Plan),
        "profile": partial(schema_of, Profile),
        "routing": partial(schema_of, RoutingRecord),
        "sensitivity": partial(
            schema_of, Sensitivity, tag=SENSITIVITY_SCHEMA, more=MappingProxyType({"words": _WORDS})
        ),
        "training-plan": partial(schema_of, TrainingDocument),
        "verification": partial(schema_of, Verification, tag=VERIFICATION_SCHEMA, more=_VERDICTS),
        "why-not": partial(schema_of, WhyNotAnswer, tag=WHY_NOT_SCHEMA, more=_COMPARISON),
    }
)
SCHEMAS: Mapping[str, Callable[[], dict[str, object]]] = MappingProxyType(
    dict(sorted({**_OF_CLASSES, **ANSWERS}.items()))
)


def schema_text(name: str) -> str:
    """Return a document's JSON schema, as it is published: indented, with a line end.

    Raises:
        NotFoundError: no schema has this name; the hint lists those there are.
    """
    if name not in SCHEMAS:
        known = nearest_or(f"use one of {', '.join(SCHEMAS)}", name, SCHEMAS)
        raise NotFoundError(f"no schema is named {name!r}", known)
    return json.dumps(SCHEMAS[name](), indent=2, ensure_ascii=False) + "\n"
