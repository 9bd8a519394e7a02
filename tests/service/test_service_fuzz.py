"""The service against what schemathesis makes of its own OpenAPI document."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from moetune.app.planner import open_planner
from moetune.config import Settings
from moetune.service.access import LOOPBACK_NAMES, Access
from moetune.service.app import create_app
from moetune.store import check
from tests.service.asking import client_of

OPERATIONS = (("/v1/plans/{plan_id}", "GET"), ("/v1/plans/{plan_id}/trace", "GET"),
              ("/v1/plans:resolve", "POST"),
              ("/v1/plans", "GET"), ("/v1/whatif", "POST"), ("/v1/check", "POST"),
              ("/v1/profiles", "GET"),
              ("/v1/profiles", "POST"), ("/v1/profiles/{name}", "GET"),
              ("/v1/runs", "GET"), ("/healthz", "GET"), ("/readyz", "GET"))  # fmt: skip
LISTS = ("/v1/plans", "/v1/runs")
_FEW = settings(max_examples=10, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """A service that keeps what it is sent, for all of these requests."""
    settings = Settings(db=str(tmp_path_factory.mktemp("fuzz") / "moetune.db"))
    with open_planner(settings) as planner:
        yield create_app(planner, Access(hosts=(*LOOPBACK_NAMES, "testserver")))
        assert not check(settings.db)


def test_the_document_names_every_address_of_the_interface(app: FastAPI) -> None:
    with client_of(app) as client:
        paths = client.get("/openapi.json").json()["paths"]
    named = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    assert set(OPERATIONS) <= named


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_right_request_makes_the_service_fail(app: FastAPI, path: str, method: str) -> None:
    _ask(app, path, method, GenerationMode.POSITIVE)


@pytest.mark.parametrize(
    ("path", "method"),
    # The others have nothing that could be wrong in itself: any text may stand in their path.
    [call for call in OPERATIONS if call[1] == "POST" or call[0] == "/v1/plans"],
)
def test_no_wrong_request_makes_the_service_fail(app: FastAPI, path: str, method: str) -> None:
    _ask(app, path, method, GenerationMode.NEGATIVE)


def _ask(app: FastAPI, path: str, method: str, mode: GenerationMode) -> None:
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = schema[path][method]

    @_FEW
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        case: Case[Any] = data.draw(operation.as_strategy(generation_mode=mode))
        answer = case.call()
        assert answer.status_code < 500, (case.body, answer.text)

    ask()
