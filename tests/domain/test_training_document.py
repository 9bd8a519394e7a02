"""Training plans read from their documents."""

import json
from typing import Any

import pytest

from moetune.domain.any_plan import plan_from_document, plan_from_json
from moetune.domain.errors import InputError
from moetune.domain.targets import planned_target
from tests.training_plans import TRAINING, training_plan


def test_a_document_is_read_whole_and_written_again() -> None:
    other = {name: TRAINING[name] for name in ("layout", "predicted", "memory")}
    plan = training_plan(
        alternatives=[
            other | {"layout": TRAINING["layout"] | {"dp": 16, "tp": 1, "pp": 1, "ep": 1}}
        ]
    )
    assert json.loads(plan.text) == plan.document
    assert plan_from_json(plan.text, "plan.json") == plan
    assert plan.inputs.tokens_per_rank == 64 * 4096 // 16
    assert plan.best.words == "dp 4 · tp 2 · pp 2 · ep 8 · micro-batch 1"
    assert [row.words for row in plan.alternatives] == ["dp 16 · micro-batch 1"]
    assert plan.best.predicted.parts["experts"] == 1.5
    assert plan.warnings == ("one stand-in",)
    assert plan.inputs.facts == planned_target(plan.inputs.target, "")


@pytest.mark.parametrize(("document", "words"), [
    ({**TRAINING, "id": "abc"}, "id must be 64 hexadecimal digits"),
    ({**TRAINING, "id": 7}, "id must be a text"),
    ({**TRAINING, "alternatives": {}}, "alternatives must be a list"),
    ({**TRAINING, "alternatives": [3]}, "alternatives[0] must be a table"),
    ({**TRAINING, "layout": None}, "layout must be a table"),
    ({**TRAINING, "layout": TRAINING["layout"] | {"tp": 0}}, "tp must be at least 1, got 0"),
    ({**TRAINING, "layout": TRAINING["layout"] | {"recompute": ["x"]}}, "recompute[0] must be"),
    ({**TRAINING, "layout": TRAINING["layout"] | {"stages": "Etx"}}, "stages 'Etx' have 'x'"),
    ({**TRAINING, "layout": {"edp": 2}}, "layout lacks the key 'dp'"),
    ({**TRAINING, "predicted": TRAINING["predicted"] | {"step_seconds": 0.0}},
     "step_seconds must be above 0, got 0.0"),
    ({**TRAINING, "predicted": {"parts": {}}}, "lacks the key 'step_seconds'"),
    ({**TRAINING, "memory": {"peak_bytes": 0.5, "parts": {}}}, "a whole number"),
    ({**TRAINING, "fits": "yes"}, "fits must be true or false"),
    ({**TRAINING, "inputs": TRAINING["inputs"] | {"target": "gpu"}}, "inputs.target"),
])  # fmt: skip
def test_what_is_wrong_is_named(document: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_from_document(document, "plan.json")
    assert words in str(caught.value).replace("plan.json: ", "")


def test_layouts_are_compared_by_parts_on_the_mean_of_their_ranks() -> None:
    piped = training_plan().best
    assert piped.layout.pp == 2
    assert piped.mean_parts == {}  # an older plan has those of the slowest rank alone
    mean = {"experts": 1.0, "bubble and sends": 1.0}
    known = training_plan(predicted=TRAINING["predicted"] | {"mean_parts": mean}).best
    assert known.mean_parts == mean
    flat = training_plan(layout=TRAINING["layout"] | {"pp": 1, "dp": 8}).best
    assert flat.mean_parts == flat.predicted.parts


def test_a_training_plan_where_a_layers_is_wanted_says_what_runs_it() -> None:
    with pytest.raises(InputError, match="is the plan of a model's training") as caught:
        training_plan().as_layer("plan.json")
    assert "moetune export plan.json --target megatron" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"), [("etp", 2), ("tp", 2), ("cp", 2), ("recompute", ["norm", "moe"])]
)
def test_a_plan_for_moetune_says_what_its_runtime_has_no_longer(key: str, value: object) -> None:
    layout = TRAINING["layout"] | {"tp": 1, "cp": 1, "etp": 1, "recompute": ["full"], key: value}
    inputs = TRAINING["inputs"] | {"target": "moetune"}
    with pytest.raises(InputError, match=rf"the file has '{key}': .* was withdrawn on"):
        plan_from_document({**TRAINING, "layout": layout, "inputs": inputs}, "the file")
