"""The OpenAPI document of the addresses that programs use."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import Response

from moetune.domain.profile import Profile
from moetune.service.bodies import JSON, TOML
from moetune.service.problems import MEDIA_TYPE, STATUSES
from moetune.service.workers import WorkerPools

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """One page of a list; `next` is the following page's `after`, null on the last page."""

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


PROBLEMS: dict[int | str, dict[str, Any]] = {
    int(status): {
        "description": status.phrase,
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemDocument")}}},
    }
    for status in sorted(STATUSES)
}
"""Answers that every address may give instead of its document."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address of the interface.

    Args:
        answer: called with the worker pools and the parameters that it names.
        summary: its title; the docstring of `answer` is its description.
        returns: the document of its answer, for documentation only.
        takes: the document of its body.
    """

    method: Literal["GET", "POST"]
    path: str
    answer: Callable[..., Awaitable[Response]]
    summary: str
    returns: type | None = None
    takes: type | None = None
    status: HTTPStatus = HTTPStatus.OK

    def add(self, app: FastAPI, pools: WorkerPools) -> None:
        """Add the address to the application."""
        app.add_api_route(
            self.path,
            partial(self.answer, pools),
            methods=[self.method],
            name=self.answer.__name__,
            summary=self.summary,
            description=self.answer.__doc__,
            response_model=self.returns,
            status_code=self.status,
            openapi_extra=None if self.takes is None else _body_of(self.takes),
        )


def _body_of(kind: type) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body; a profile may also be TOML."""
    content = {JSON: {"schema": {"$ref": _REF.format(model=kind.__name__)}}}
    if kind is Profile:
        content[TOML] = {"schema": {"type": "string"}}
    return {"requestBody": {"required": True, "content": content}}


def openapi_of(app: FastAPI, addresses: Iterable[Address]) -> dict[str, Any]:
    """Return the OpenAPI document of the application, with the schemas of its bodies."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="Plans of Mixture-of-Experts training jobs, and profiles of machines.",
        routes=app.routes,
    )
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    bodies = (address.takes for address in addresses if address.takes is not None)
    for kind in (*bodies, ProblemDocument):
        schema = TypeAdapter(kind).json_schema(ref_template=_REF)
        for name, part in schema.pop("$defs", {}).items():
            schemas.setdefault(name, part)
        schemas.setdefault(kind.__name__, schema)
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]
    return document
