"""OpenAPI descriptions of bodies and answers, for documentation only.

Values are checked by the domain, whose errors help more than a schema's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from moetune.app.plan import InputsDocument
from moetune.domain.ask import LARGEST_TOKENS
from moetune.domain.profile import Profile
from moetune.domain.records import Observation
from moetune.service.bodies import JSON, TOML
from moetune.service.problems import MEDIA_TYPE, STATUSES

_REF = "#/components/schemas/{model}"
_MAX_ID = 2**63 - 1

Limit = Annotated[int, Query(ge=1, le=500, description="Largest number of entries.")]
PlanCursor = Annotated[
    str, Query(pattern="^([0-9a-f]{64})?$", description="`next` of the previous page.")
]
RowCursor = Annotated[int, Query(ge=0, le=_MAX_ID, description="`next` of the previous page.")]
OtherDegree = Annotated[int | None, Query(ge=1, le=LARGEST_TOKENS, description="Chunks.")]
OtherWay = Annotated[str | None, Query(max_length=300, description="As of `moetune explain`.")]
NameCursor = Annotated[str, Query(max_length=200, description="`next` of the previous page.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeDocument:
    """A stored plan or inputs, and the changes: other inputs, or other speeds of the machine."""

    schema: Literal["moetune.whatif/1"] = "moetune.whatif/1"
    plan_id: str | None = None
    inputs: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    speeds: Mapping[Literal["computation", "communication", "copies"], float] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """1 to 1,000 measured steps, all stored or none."""

    schema: Literal["moetune.observations/1"]
    observations: tuple[Observation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """One page of a list; `next` is the following page's `after`, null on the last one."""

    schema: str
    items: tuple[dict[str, object], ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDocument:
    """An error (RFC 9457); `code` is the command line's exit code for it."""

    schema: Literal["moetune.problem/1"]
    type: str
    title: str
    status: int
    detail: str
    code: int
    hint: str


PLAN_ID: dict[str, Any] = {
    "parameters": [
        {
            "name": "plan_id",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
        },
        {"name": "If-None-Match", "in": "header", "schema": {"type": "string"}},
    ]
}
_BODIES: tuple[type, ...] = (InputsDocument, ChangeDocument, Observations, Profile, ProblemDocument)
PROBLEMS: dict[int | str, dict[str, Any]] = {
    int(status): {
        "description": status.phrase,
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemDocument")}}},
    }
    for status in sorted({HTTPStatus.REQUEST_ENTITY_TOO_LARGE, *STATUSES})
}
"""Answers that every address may give instead of its document."""


def json_body(kind: type) -> dict[str, Any]:
    """Return the description of a JSON body."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": _ref(kind)}}}}


def profile_body() -> dict[str, Any]:
    """Return the description of a profile's body, JSON or TOML."""
    toml = {"schema": {"type": "string"}}
    content = {JSON: {"schema": _ref(Profile)}, TOML: toml}
    return {"requestBody": {"required": True, "content": content}}


def openapi_of(app: FastAPI, *, version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the application."""
    found = get_openapi(
        title="moetune",
        version=version,
        description="Plans of Mixture-of-Experts training jobs, with profiles and observations.",
        routes=app.routes,
    )
    parts = found.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for kind in _BODIES:
        schema = TypeAdapter(kind).json_schema(ref_template=_REF)
        for name, part in schema.pop("$defs", {}).items():
            schemas.setdefault(name, part)
        schemas.setdefault(kind.__name__, schema)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    found["security"] = [{}, {"token": []}]
    return found


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}
