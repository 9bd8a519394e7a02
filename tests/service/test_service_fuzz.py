"""The service against what schemathesis makes of its own OpenAPI document."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from moetune.service.access import Access
from moetune.service.app import create_app
from moetune.workflows.desk import Desk
from tests.service.asking import client_of

OPERATIONS = (
    ("/v1/plans/{plan_id}", "GET"),
    ("/v1/plans/{plan_id}/explain", "GET"),
    ("/v1/plans/{plan_id}/trace", "GET"),
    ("/v1/plans:resolve", "POST"),
    ("/v1/plans", "GET"),
    ("/v1/whatif", "POST"),
    ("/v1/profiles", "GET"),
    ("/v1/profiles", "POST"),
    ("/v1/profiles/{name}", "GET"),
    ("/v1/machines", "GET"),
    ("/v1/fits", "GET"),
    ("/v1/observations", "GET"),
    ("/v1/observations", "POST"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
)
_BUSY = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def app(desk: Desk, hosts: tuple[str, ...]) -> Iterator[FastAPI]:
    yield create_app(desk, Access(hosts=hosts))


def test_the_document_names_every_address_of_the_interface(app: FastAPI) -> None:
    with client_of(app) as client:
        paths = client.get("/openapi.json").json()["paths"]
    named = {(path, method.upper()) for path, found in paths.items() for method in found}
    assert set(OPERATIONS) <= named


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_service_fail(
    app: FastAPI, path: str, method: str, mode: GenerationMode
) -> None:
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = schema[path][method]

    @_BUSY
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        case: Case = data.draw(operation.as_strategy(generation_mode=mode))
        answer = case.call()
        assert answer.status_code < 500, (case.body, answer.text)

    ask()
