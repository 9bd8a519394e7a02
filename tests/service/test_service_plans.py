"""Plans by HTTP: the command line's answers, once solved and then known."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.cli import app as program
from moetune.domain.any_plan import plan_from_json
from moetune.domain.document import encode
from moetune.service.problems import MEDIA_TYPE
from tests.service.asking import SMALL, Client

UNKNOWN = "ab" * 32


def _by_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert program.main(("--no-config", "--db", str(tmp_path / "cli.db"), *arguments)) == 0
    return str(capfd.readouterr().out)


def test_resolve_answers_with_the_document_of_the_command_line(
    client: Client, inputs: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = client.post("/v1/plans:resolve", inputs)
    assert answer.status_code == 200
    wanted = _by_command(
        tmp_path, capfd, "plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--json"
    )
    assert answer.text == wanted


@pytest.mark.parametrize("asked", [
    {"model": "ppmoe-6.7b"},
    {"num_layers": 4, "num_heads": 8, "seq": 512, "vocab": 1000, "d_model": 512,
     "d_hidden": 2048, "num_experts": 8, "global_batch": 64},
])  # fmt: skip
def test_models_of_papers_and_sizes_are_planned_for(client: Client, asked: dict[str, Any]) -> None:
    made = client.post("/v1/plans:resolve", {**asked, "profile": "v100-x256", "world_size": 8})
    assert made.status_code == 200
    assert made.json()["predicted"]["step_seconds"] > 0


def test_a_layer_with_its_sizes_is_planned_for(client: Client) -> None:
    layer = {"d_model": 512, "d_hidden": 2048, "num_experts": 64, "top_k": 2, "activation": "relu"}
    asked = {"layer": layer, "profile": "rtx2080ti-x64", "tokens_per_rank": 2048, "world_size": 64,
             "dtype": "float16", "constraints": {"max-degree": "4"}}  # fmt: skip
    plan = plan_from_json(client.post("/v1/plans:resolve", asked).content, "answer").as_layer()
    assert encode(plan.inputs.layer) == layer
    assert (plan.inputs.world_size, plan.inputs.tokens_per_rank) == (64, 2048)
    assert plan.pipeline.forward_degree <= 4


@pytest.mark.parametrize("asked", [
    SMALL,
    {"model": "ppmoe-6.7b", "profile": "v100-x256", "world_size": 8},
    {"model": "olmoe", "profile": "h100-x8", "global_batch": 32, "seq": 2048, "tp": 2,
     "target": "megatron", "recompute": "norm", "routing": "natural"},
])  # fmt: skip
def test_the_inputs_of_a_plan_lead_to_the_same_plan(client: Client, asked: dict[str, Any]) -> None:
    first = client.post("/v1/plans:resolve", asked)
    inputs = first.json()["inputs"]
    again = client.post("/v1/plans:resolve", inputs)
    assert again.content == first.content
    what = client.post("/v1/whatif", {"inputs": inputs, "speeds": {"communication": 2}})
    assert what.json()["before"] == first.json()
    changed = client.post("/v1/plans:resolve", {**inputs, "profile_fingerprint": "ab" * 32})
    assert changed.status_code == 422
    assert "omit profile_fingerprint" in changed.json()["hint"]


def test_a_known_plan_has_the_same_bytes_and_tag(client: Client, inputs: dict[str, Any]) -> None:
    made = client.post("/v1/plans:resolve", inputs)
    read = client.get(made.headers["content-location"])
    assert read.status_code == 200
    assert read.content == made.content
    assert read.headers["etag"] == made.headers["etag"]
    assert read.headers["content-type"] == "application/json"


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_who_has_the_plan_gets_nothing(client: Client, inputs: dict[str, Any], form: str) -> None:
    made = client.post("/v1/plans:resolve", inputs)
    etag = made.headers["etag"]
    path = made.headers["content-location"]
    again = client.get(path, headers={"If-None-Match": form.format(etag)})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_many_that_ask_at_once_get_the_same_bytes(client: Client, inputs: dict[str, Any]) -> None:
    answers = client.together([("/v1/plans:resolve", inputs)] * 48)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(client.get("/v1/plans").json()["items"]) == 1


@pytest.mark.parametrize("part", ["", "/trace"])
@pytest.mark.parametrize("plan_id", [UNKNOWN, "3f9c21", "x", UNKNOWN.upper()])
def test_an_unknown_id_says_where_the_ids_are(steady: Client, plan_id: str, part: str) -> None:
    answer = steady.get(f"/v1/plans/{plan_id}{part}")
    problem = answer.json()
    assert answer.status_code == problem["status"] == 404
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert plan_id in problem["detail"]
    assert "/v1/plans" in problem["hint"]


def test_a_trace_is_the_document_of_the_command_line(
    client: Client, inputs: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_id = client.post("/v1/plans:resolve", inputs).json()["id"]
    _by_command(tmp_path, capfd, "plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64")
    trace = client.get(f"/v1/plans/{plan_id}/trace").json()
    out = tmp_path / "trace.json"
    _by_command(tmp_path, capfd, "trace", plan_id, "--output", str(out))
    drawn = json.loads(out.read_text())
    assert trace["traceEvents"] == drawn["traceEvents"]
    assert trace == drawn
    assert trace["schema"] == "moetune.timeline/2"


@pytest.mark.parametrize("address", ["/v1/plans:resolve", "/v1/whatif"])
@pytest.mark.parametrize("name", ["{}", "../secret.toml", "secret.toml"])
def test_no_file_of_the_services_machine_is_read(
    steady: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, name: str
) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text("password = hunter2")
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {"model": "gpt-s", "profile": name.format(secret)}
    answer = steady.post(address, asked if "plans" in address else {"inputs": asked})
    assert answer.status_code == 422
    assert "profile must be a name" in answer.json()["detail"]
    assert "hunter2" not in answer.text
