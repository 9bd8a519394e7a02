"""Published JSON schemas: those that the command prints, and what the documents really are."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.document import encode
from moetune.domain.routing_record import ModelRoutingRecord, record_of
from tests.app.test_observed_views import ALONE, PLANNED, verification
from tests.cli.running import OLMOE, Cli
from tests.schemas import PUBLISHED, SCHEMAS, schema_text

PLAN = ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--dtype", "float16")
TRAINING = ("plan", *OLMOE, "--target", "megatron", "--tp", "1", "--pp", "1", "--ep", "8",
            "--micro-batch", "1")  # fmt: skip


def check(name: str, document: Any) -> None:
    schema = json.loads((PUBLISHED / f"{name}.json").read_text())
    jsonschema_rs.validator_for(schema).validate(json.loads(json.dumps(encode(document))))


def test_published_schemas_are_those_that_the_command_prints(cli: Cli) -> None:
    assert {path.stem for path in PUBLISHED.glob("*.json")} == {*SCHEMAS}
    assert cli("schema").out.split() == sorted(SCHEMAS)
    assert cli("schema", "--json").document["names"] == sorted(SCHEMAS)
    assert cli("schema", "plan").out == (PUBLISHED / "plan.json").read_text()
    for name in SCHEMAS:
        assert (PUBLISHED / f"{name}.json").read_text() == schema_text(name)


def test_schemas_are_valid_and_refuse_what_is_not_theirs() -> None:
    for name in SCHEMAS:
        schema = json.loads((PUBLISHED / f"{name}.json").read_text())
        jsonschema_rs.meta.validate(schema)
        assert not jsonschema_rs.validator_for(schema).is_valid({"schema": "moetune.other/1"})


def test_documents_of_a_layers_plan(cli: Cli, tmp_path: Path) -> None:
    plan = cli(*PLAN, "--json", "--output", str(tmp_path / "plan.json")).document
    check("plan", plan)
    wrong = {**plan, "memory": {**plan["memory"], "state_bytes": "many"}}
    with pytest.raises(jsonschema_rs.ValidationError, match="many"):
        check("plan", wrong)
    with pytest.raises(jsonschema_rs.ValidationError, match="surprise"):
        check("plan", {**plan, "surprise": 1})
    check("explanation", cli("explain", str(tmp_path / "plan.json"), "--json").document)


def test_documents_of_a_whole_models_plan_an_export_and_an_error(cli: Cli, tmp_path: Path) -> None:
    layout = cli("plan", "--model", "gpt-2.7b", "--profile", "a100-x4", "--world-size", "1",
                 "--memory-limit", "40GiB", "--json").document  # fmt: skip
    assert layout["chunks"]["offload"]
    check("training-plan", layout)
    made = cli(*TRAINING, "--output", str(tmp_path / "training.json"))
    assert made.code == 0
    check("training-plan", json.loads((tmp_path / "training.json").read_text()))
    check("training-plan", cli(*TRAINING, "--front", "--json").document)
    exported = cli("export", str(tmp_path / "training.json"), "--to", "megatron", "--json")
    check("export", exported.document)
    check("error", cli("plan", "--model", "no-such", "--json").document)
    too_large = cli(*TRAINING, "--memory-limit", "1GiB", "--json")
    assert too_large.code == 3
    check("error", too_large.document)


def test_other_documents(cli: Cli) -> None:
    routing = record_of([(3, 1)], (3, 1), top_k=1, num_ranks=2)
    check("routing", routing)
    check("model-routing", ModelRoutingRecord(layers=(routing, routing)))
    check("doctor", cli("doctor", "--json").document)
    check("profile", load_profile_file(bundled_profiles()["h100-x8"]))
    check("verification", verification(ALONE, PLANNED).document)
    assert cli("completion", "bash", "--json").document["shell"] == "bash"


def test_an_unknown_document_is_refused_by_name(cli: Cli) -> None:
    refused = cli("schema", "plam")
    assert "'plam'" in refused.err
    assert "did you mean 'plan'?" in refused.err
