"""JSON schemas of the documents that are put together from values: lists, removals, pages."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from moetune.domain.any_plan import AnyPlan
from moetune.domain.cluster import Machine
from moetune.domain.json_schema import Keys, ListOf, schema_of_keys
from moetune.domain.layer import LayerShape
from moetune.domain.model import Model, WholeModel
from moetune.domain.placement import ModelPlacement
from moetune.domain.plan import Confidence, PhaseTerms, Plan, StrategyTerms
from moetune.domain.profile import ProfileQuality
from moetune.domain.records import FitInfo, MachineInfo, Observation, PlanInfo
from moetune.domain.samples import Point
from moetune.domain.training_document import TrainingLayout
from moetune.huggingface.registry import RegisteredModel
from moetune.workflows.drift import OperationDrift
from moetune.workflows.plan import InputsDocument
from moetune.workflows.profile_quality import GroupSummary
from moetune.workflows.profiles import Difference, ProfileInfo
from moetune.workflows.staleness import Check
from moetune.workflows.trace import Overlap

_Texts = tuple[str, ...]
_Objects = tuple[object, ...]
_Parts = Mapping[str, float]
_TABLE = {"name": str, "header": _Texts, "units": _Texts, "rows": tuple[_Objects, ...],
          "notes": _Texts}  # fmt: skip
_SECTION = {
    "name": str, "title": str, "scope": str, "paragraphs": _Texts, "notes": _Texts,
    "highlights": ListOf(Keys({"name": str, "value": object, "unit": str, "note": str})),
    "tables": ListOf(Keys(_TABLE)),
}  # fmt: skip
_SECTIONS = {"sections": ListOf(Keys(_SECTION))}
"""What the answer's words and tables say, beside the values of each command."""
_OBSERVATION = Keys({"id": int, "created_at": str}, of=Observation)
_OVERLAPS = {"predicted": Overlap | None, "measured": Overlap | None}
_RUN = {
    "name": str, "run_id": int, "store": str, "machine": Machine, "num_samples": int,
    "num_reused": int, "num_failed": int, "drifted": bool, "groups": tuple[GroupSummary, ...],
}  # fmt: skip
_DECODER = {
    "layer": LayerShape | None, "seq": int, "num_layers": int | None, "num_moe_layers": int | None,
    "parameters": int | None, "active_parameters": int | None, "flops_per_token": float | None,
    "parts": object, "kinds": _Objects | None, "runs": _Objects | None, "layers": _Objects | None,
    "mtp": Mapping[str, int] | None,
}  # fmt: skip
_MODELS: Mapping[str, tuple[Keys, ...]] = {
    "memory/1": (
        Keys({
            "inputs": Keys({
                "model": str, "world_size": int, "seq": int, "global_batch": int, "dtype": str,
                "optimizer": str, "target": str, "device_bytes": int,
            }),
            "limit_bytes": int, "fits": bool, "num_fitting": int,
            "layouts": ListOf(Keys({
                "layout": Mapping[str, object], "peak_bytes": int, "host_bytes": int,
                "parts": Mapping[str, int], "activations": Mapping[str, int],
            })),
            **_SECTIONS,
        }),
    ),
    "model/1": (
        Keys({"world_size": int, **_DECODER, **_SECTIONS}, of=Model),
        Keys({
            "name": str, "title": str, "source": str, "published": str, "family": str,
            "d_model": int, "vocab_size": int, "is_tied": bool, "uncounted": _Texts,
            **_DECODER, **_SECTIONS,
        }),
    ),
    "models/1": (
        Keys({
            "models": tuple[Model, ...], "whole": tuple[WholeModel, ...],
            "huggingface": tuple[RegisteredModel, ...], **_SECTIONS,
        }),
    ),
}  # fmt: skip
_PLANS: Mapping[str, tuple[Keys, ...]] = {
    "drift/1": (Keys({"items": ListOf(Keys({"words": str}, of=OperationDrift))}),),
    "explanation/1": (
        Keys({
            "plan": Plan, "forward": PhaseTerms | None, "backward": PhaseTerms | None,
            "strategies": tuple[StrategyTerms, ...], "note": str,
        }),
    ),
    "inputs/1": (Keys({}, of=InputsDocument),),
    "observations/1": (Keys({"observations": tuple[Observation, ...]}),),
    "observations.list/1": (Keys({"observations": ListOf(_OBSERVATION), **_SECTIONS}),),
    "plans.diff/1": (Keys({"first": str, "second": str, **_SECTIONS}),),
    "plans.list/1": (Keys({"plans": tuple[PlanInfo, ...], **_SECTIONS}),),
    "timeline/2": (
        Keys({
            "traceEvents": tuple[Mapping[str, object], ...], "displayTimeUnit": str, **_OVERLAPS,
        }),
    ),
    "trace/1": (Keys({"file": str, **_OVERLAPS}),),
    "training-explanation/1": (
        Keys({
            "plan": str, "step_seconds": float, "confidence": Confidence,
            "profile_quality": ProfileQuality | None, "kinds": _Parts,
            "saved_by_overlap_seconds": float, "hidden_by_shared_experts_seconds": float,
            "model_tflops_per_device": float, "mfu": float | None, "parts": _Parts,
            "memory": Keys({
                "peak_bytes": int, "limit_bytes": int | None, "parts": Mapping[str, int],
            }),
            "alternatives": ListOf(Keys({
                "layout": TrainingLayout, "step_seconds": float, "differences": _Parts,
            })),
        }, optional={"placement": ModelPlacement}),
    ),
    "whatif/1": (
        Keys({"before": AnyPlan, "after": AnyPlan, "words": _Texts}, optional=_SECTIONS),
    ),
}  # fmt: skip
_PROFILES: Mapping[str, tuple[Keys, ...]] = {
    "profile-check/1": (Keys({"name": str}, of=Check),),
    "profile-plan/1": (
        Keys({
            "num_points": int, "seconds": float,
            "points": ListOf(Keys({"point": Point, "seconds": float})),
        }),
    ),
    "profile-run/1": (Keys(_RUN),),
    "profiles/1": (Keys({"profiles": tuple[ProfileInfo, ...], **_SECTIONS}),),
    "profiles.diff/1": (
        Keys({
            "first": str, "second": str,
            "differences": ListOf(Keys({"ratio": float | None}, of=Difference)), **_SECTIONS,
        }),
    ),
}  # fmt: skip
_PROGRAM: Mapping[str, tuple[Keys, ...]] = {
    "config/1": (
        Keys({"settings": Mapping[str, object]}, optional={"origins": Mapping[str, str]}),
    ),
    "problem/1": (
        Keys({
            "type": str, "title": str, "status": int, "detail": str, "code": int, "hint": str,
        }),
    ),
}  # fmt: skip


def _page(row: Any) -> tuple[Keys, ...]:  # noqa: ANN401 - a list of any type
    """Return a page of the service's lists; `next` is the following page's `after`."""
    return (Keys({"items": row, "next": str | None}),)


_PAGES: Mapping[str, tuple[Keys, ...]] = {
    "fits/1": _page(tuple[FitInfo, ...]),
    "machines/1": _page(tuple[MachineInfo, ...]),
    "observations.page/1": _page(ListOf(_OBSERVATION)),
    "plans/1": _page(tuple[PlanInfo, ...]),
    "profiles.page/1": _page(tuple[ProfileInfo, ...]),
}
ANSWERS: Mapping[str, Callable[[], dict[str, object]]] = MappingProxyType(
    {
        tag.partition("/")[0]: partial(schema_of_keys, f"moetune.{tag}", *forms)
        for tag, forms in {**_MODELS, **_PLANS, **_PROFILES, **_PROGRAM, **_PAGES}.items()
    }
)
"""By name, the document's key `schema` without "moetune." and its version."""
