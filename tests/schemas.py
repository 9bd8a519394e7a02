"""JSON schemas of documents, from their classes: `python -m tests.schemas` writes `docs/schemas`.

They are read from the dataclasses that `encode` writes and `decode` reads; documents that are put
together from values have `Keys` with the values' types.

Source: JSON Schema, draft 2020-12. What no annotation says (ranges, hashes) `decode` checks alone.
"""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moetune.app.doctor import Diagnosis
from moetune.app.export import ExportDocument
from moetune.app.observe import ObservedPart
from moetune.app.plan import SentInputs
from moetune.app.profiles import ProfileInfo
from moetune.app.trace import Overlap
from moetune.app.verify import Verification
from moetune.domain.any_plan import AnyPlan
from moetune.domain.budget import Budget, Spread, TrainingRun
from moetune.domain.cluster import Machine
from moetune.domain.document import DERIVED, ErrorDocument, is_required, written_kinds
from moetune.domain.layer import LayerShape
from moetune.domain.model import Model, WholeModel
from moetune.domain.placement import ModelPlacement
from moetune.domain.plan import Confidence, Plan
from moetune.domain.profile import Profile, ProfileQuality
from moetune.domain.records import Calibration, ObservedRun, PlanInfo
from moetune.domain.routing_record import ModelRoutingRecord, RoutingRecord
from moetune.domain.terms import PhaseTerms, StrategyTerms
from moetune.domain.training import FoldedLayout
from moetune.domain.training_document import TrainingDocument, TrainingMemory, TrainingStep
from moetune.domain.tuning import Trained
from moetune.huggingface.registry import RegisteredModel
from moetune.launches.reading import Problem, Row
from moetune.logs.kineto import TracedStep
from moetune.logs.reading import SteadySteps
from moetune.report.sensitivity import Sensitivity
from moetune.report.why_not import ComparedVerdict, StepDifference, WhyNotAnswer

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: Mapping[object, dict[str, object]] = types.MappingProxyType(
    {
        int: {"type": "integer"},
        float: {"type": "number"},
        str: {"type": "string"},
        bool: {"type": "boolean"},
        types.NoneType: {"type": "null"},
        object: {},
        Any: {},
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """An object that is put together: its keys with their types, and no others.

    Args:
        of: a dataclass, whose keys it has besides.
        optional: keys that may be missing.
    """

    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of: type | None = None
    optional: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def list_of(keys: Keys) -> Any:
    """Return the type of a list of objects that are put together."""
    return types.GenericAlias(tuple, (keys, ...))


_Texts = tuple[str, ...]
_Objects = tuple[object, ...]
_Parts = Mapping[str, float]
_TABLE = {"name": str, "header": _Texts, "units": _Texts, "rows": tuple[_Objects, ...],
          "notes": _Texts}  # fmt: skip
_SECTION = {
    "name": str, "title": str, "scope": str, "paragraphs": _Texts, "notes": _Texts,
    "highlights": list_of(Keys({"name": str, "value": object, "unit": str, "note": str})),
    "tables": list_of(Keys(_TABLE)),
}  # fmt: skip
_SECTIONS = {"sections": list_of(Keys(_SECTION))}
"""What the answer's words and tables say, beside the values of each command."""
_OBSERVED_RUN = Keys({"id": int, "created_at": str}, of=ObservedRun)
_OVERLAPS = {"predicted": Overlap | None, "measured": Overlap | None}
_RUN = {
    "name": str, "run_id": int, "store": str, "machine": Machine, "num_samples": int,
    "num_reused": int, "num_failed": int, "quality": ProfileQuality | None,
}  # fmt: skip
_DECODER = {
    "layer": LayerShape | None, "seq": int, "num_layers": int | None, "num_moe_layers": int | None,
    "parameters": int | None, "active_parameters": int | None, "flops_per_token": float | None,
    "parts": object, "kinds": _Objects | None, "runs": _Objects | None, "layers": _Objects | None,
    "mtp": Mapping[str, int] | None,
}  # fmt: skip


_BETTER: Any = Keys({
    "change": str, "keys": Mapping[str, object], "layout": FoldedLayout, "step_seconds": float,
    "peak_bytes": int, "seconds_saved": float | None,
})  # fmt: skip


def _page(row: Any) -> Keys:
    """Return a page of the service's lists; `next` is the following page's `after`."""
    return Keys({"items": row, "next": str | None})


_DOCUMENTS: Mapping[str, Keys | tuple[Keys, ...]] = {
    "check/1": Keys({
        "file": str, "inputs": Keys({
            "model": str, "world_size": int, "global_batch": int, "seq": int, "dtype": str,
            "optimizer": str, "target": str, "profile": str,
        }, optional={"budget": Budget}),
        "starts": bool, "layout": FoldedLayout, "settings": tuple[Row, ...],
        "problems": tuple[Problem, ...], "predicted": TrainingStep | None,
        "step_seconds": Spread | None, "run": TrainingRun | None,
        "memory": TrainingMemory | None, "memory_limit_bytes": int, "better": list_of(_BETTER),
        "best": object, "calibration": Calibration | None, **_SECTIONS,
    }),
    "observe/1": Keys({
        "source": str, "plan": str, "run": ObservedRun, "id": int | None,
        "predicted": Keys({
            "step_seconds": float, "low_seconds": float, "high_seconds": float,
            "uncalibrated_seconds": float,
        }),
        "ratio": float, "inside": bool, "steps": SteadySteps | None, "log": object,
        "trace": TracedStep | None,
        "memory_scope": str, "parts": tuple[ObservedPart, ...], "calibration": Calibration | None,
        **_SECTIONS,
    }),
    "compare/1": Keys({
        "inputs": Keys({"model": str, "global_batch": int, "seq": int}, of=Budget),
        "choices": list_of(Keys(
            {"profile": str, "world_size": int, "target": str},
            optional={
                "word": str, "error": str, "hint": str, "layout": FoldedLayout, "dtype": str,
                "step_seconds": Spread, "tokens_per_second": float, "mfu": float | None,
                "peak_bytes": int, "run": TrainingRun, "price_per_gpu_hour": float | None,
                "better": object, "calibration": Calibration | None,
            },
        )),
        **_SECTIONS,
    }),
    "memory/1": Keys({
        "inputs": Keys({
            "model": str, "world_size": int, "seq": int, "global_batch": int, "dtype": str,
            "optimizer": str, "target": str, "device_bytes": int,
        }, optional={"train": str}),
        "limit_bytes": int, "fits": bool, "num_fitting": int,
        "layouts": list_of(Keys({
            "layout": Mapping[str, object], "peak_bytes": int, "host_bytes": int,
            "parts": Mapping[str, int], "activations": Mapping[str, int],
        })),
        **_SECTIONS,
    }, optional={"trained": Trained}),
    "model/1": (
        Keys({"world_size": int, **_DECODER, **_SECTIONS}, of=Model),
        Keys({
            "name": str, "title": str, "source": str, "published": str, "family": str,
            "d_model": int, "vocab_size": int, "is_tied": bool, "uncounted": _Texts,
            **_DECODER, **_SECTIONS,
        }),
    ),
    "models/1": Keys({
        "models": tuple[Model, ...], "whole": tuple[WholeModel, ...],
        "huggingface": tuple[RegisteredModel, ...], **_SECTIONS,
    }),
    "explanation/1": Keys({
        "plan": Plan, "forward": PhaseTerms | None, "backward": PhaseTerms | None,
        "strategies": tuple[StrategyTerms, ...], "note": str,
    }),
    "inputs/1": Keys(of=SentInputs),
    "observations.list/1": Keys({
        "runs": list_of(_OBSERVED_RUN), **_SECTIONS,
    }),
    "plans.diff/1": Keys({"first": str, "second": str, **_SECTIONS}),
    "plans.list/1": Keys({"plans": tuple[PlanInfo, ...], **_SECTIONS}),
    "timeline/2": Keys({
        "traceEvents": tuple[Mapping[str, object], ...], "displayTimeUnit": str, **_OVERLAPS,
    }),
    "trace/1": Keys({"file": str, **_OVERLAPS}),
    "training-explanation/1": Keys({
        "plan": str, "step_seconds": float, "confidence": Confidence,
        "profile_quality": ProfileQuality | None, "kinds": _Parts,
        "saved_by_overlap_seconds": float, "model_tflops_per_device": float, "mfu": float | None,
        "parts": _Parts,
        "memory": Keys({
            "peak_bytes": int, "limit_bytes": int | None, "parts": Mapping[str, int],
        }),
        "alternatives": list_of(Keys({
            "layout": FoldedLayout, "step_seconds": float, "differences": _Parts,
        })),
    }, optional={"placement": ModelPlacement}),
    "whatif/1": Keys({"before": AnyPlan, "after": AnyPlan, "words": _Texts}, optional=_SECTIONS),
    "profile-run/1": Keys(_RUN),
    "profiles/1": Keys({"profiles": tuple[ProfileInfo, ...], **_SECTIONS}),
    "problem/1": Keys({
        "type": str, "title": str, "status": int, "detail": str, "code": int, "hint": str,
    }),
    "doctor/1": Keys(of=Diagnosis),
    "error": Keys(of=ErrorDocument),
    "export": Keys(of=ExportDocument),
    "model-routing": Keys(of=ModelRoutingRecord),
    "plan": Keys(of=Plan),
    "plans/1": _page(tuple[PlanInfo, ...]),
    "profile": Keys(of=Profile),
    "profiles.page/1": _page(tuple[ProfileInfo, ...]),
    "routing": Keys(of=RoutingRecord),
    "runs.page/1": _page(list_of(_OBSERVED_RUN)),
    "sensitivity/1": Keys({"words": _Texts}, of=Sensitivity),
    "training-plan": Keys(of=TrainingDocument),
    "verification/1": Keys(
        {"is_equal": bool, "is_inside": bool, "has_lost": bool}, of=Verification
    ),
    "why-not/1": Keys(
        {"verdict": ComparedVerdict, "difference": StepDifference | None, "words": _Texts},
        of=WhyNotAnswer,
    ),
}  # fmt: skip
"""Documents by name; a name with a version has the key `schema` before its fields."""


def _schema_named(tag: str) -> dict[str, object]:
    document = _DOCUMENTS[tag]
    forms = document if isinstance(document, tuple) else (document,)
    return schema_of(*forms, tag=f"moetune.{tag}" if "/" in tag else None)


SCHEMAS = {tag.partition("/")[0]: tag for tag in _DOCUMENTS}


def schema_text(name: str) -> str:
    """Return a document's JSON schema, indented, with a line end."""
    return json.dumps(_schema_named(SCHEMAS[name]), indent=2, ensure_ascii=False) + "\n"


def schema_of(*forms: Keys, tag: str | None = None) -> dict[str, object]:
    """Return the JSON schema of a document in one of several forms.

    Keys of a dataclass whose field has no default are required, no others are allowed.

    Args:
        tag: value of the key `schema` that is put before the others; None where there is none.
    """
    first = {} if tag is None else {"schema": {"const": tag}}
    title = forms[0].of.__name__ if tag is None and forms[0].of else tag
    definitions: dict[str, object] = {}
    objects = [_put_together(form, definitions) for form in forms]
    for written in objects:
        written["properties"] = {**first, **written["properties"]}
        written["required"] = [*first, *written["required"]]
    whole: dict[str, object] = objects[0] if len(objects) == 1 else {"anyOf": objects}
    return {"$schema": DIALECT, "title": title, **whole, "$defs": definitions}


def _put_together(keys: Keys, definitions: dict[str, object]) -> dict[str, Any]:
    whole = _no_keys() if keys.of is None else _object(keys.of, definitions)
    for name, kind in {**keys.keys, **keys.optional}.items():
        whole["properties"][name] = _schema(kind, definitions)
    whole["required"] += [*keys.keys]
    return whole


def _no_keys() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "required": [], "additionalProperties": False}


def _object(kind: type, definitions: dict[str, object]) -> dict[str, Any]:
    derived = {
        name: get_type_hints(getattr(kind, name).fget)["return"]
        for name in getattr(kind, DERIVED, ())
    }
    kinds = {**written_kinds(kind), **derived}
    return {
        "type": "object",
        "properties": {name: _schema(written, definitions) for name, written in kinds.items()},
        "required": [item.name for item in dataclasses.fields(kind) if is_required(item)],
        "additionalProperties": False,
    }


def _schema(kind: Any, definitions: dict[str, object]) -> dict[str, object]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(choice, definitions) for choice in inner]}
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is tuple:
        return _array(inner, definitions)
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(inner[1], definitions)}
    if dataclasses.is_dataclass(kind):
        written: Callable[..., dict[str, object]] = (
            _put_together if isinstance(kind, Keys) else _reference
        )
        return written(kind, definitions)
    return dict(_SCALARS[kind])


def _array(kinds: tuple[Any, ...], definitions: dict[str, object]) -> dict[str, object]:
    if kinds[-1] is Ellipsis:
        return {"type": "array", "items": _schema(kinds[0], definitions)}
    items = [_schema(item, definitions) for item in kinds]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _reference(kind: Any, definitions: dict[str, object]) -> dict[str, object]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


if __name__ == "__main__":
    for name in SCHEMAS:
        (PUBLISHED / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
