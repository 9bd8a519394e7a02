"""`moetune models` with Hugging Face configurations, by name and by path."""

import json
from pathlib import Path

import pytest

from moetune.domain.model import MODELS, WHOLE_MODELS
from tests.cli.running import Cli
from tests.huggingface.configs import DEEPSEEK, QWEN3


def test_show_gives_sizes_and_flops_of_a_named_model(cli: Cli) -> None:
    document = cli("models", "show", "Qwen/Qwen3-30B-A3B", "--json").document
    assert document["layer"] == {
        "d_model": 2048, "d_hidden": 768, "num_experts": 128, "top_k": 8, "activation": "swiglu",
    }  # fmt: skip
    assert document["num_layers"] == document["num_moe_layers"] == 48
    assert document["parameters"] == 30_532_122_624
    assert document["active_parameters"] == pytest.approx(3.35e9, rel=0.005)
    assert document["flops_per_token"] == pytest.approx(23.0e9, rel=0.01)
    assert document["seq"] == 4096
    longer = cli("models", "show", "qwen3-30b-a3b", "--seq", "8192", "--json").document
    assert longer["flops_per_token"] > document["flops_per_token"]


def test_parts_layers_and_kinds_add_up(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**DEEPSEEK, "num_nextn_predict_layers": 1}))
    document = cli("models", "show", str(file), "--json").document
    parts = document["parts"]
    assert sum(parts["parameters"].values()) == document["parameters"]
    assert sum(parts["active_parameters"].values()) == document["active_parameters"]
    assert sum(parts["flops_per_token"].values()) == document["flops_per_token"]
    for part in ("attention", "dense", "router", "routed", "shared"):
        layers = [layer["parameters"][part] for layer in document["layers"]]
        assert sum(layers) == parts["parameters"][part] > 0
    assert [layer["kind"] for layer in document["layers"]] == [0, 1, 1, 1]
    assert document["runs"] == [
        {"first": 0, "num_layers": 1, "kind": 0}, {"first": 1, "num_layers": 3, "kind": 1},
    ]  # fmt: skip
    assert [kind["num_layers"] for kind in document["kinds"]] == [1, 3]
    assert document["mtp"]["steps"] == 1
    assert document["mtp"]["parameters"] > 0


def test_a_folder_is_read_and_shown_in_words(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    out = cli("models", "show", str(tmp_path)).out
    assert "64 × 32, 8 experts, top 2, swiglu" in out
    assert "4, 4 with experts" in out


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_the_papers_are_no_decoders(cli: Cli, name: str) -> None:
    document = cli("models", "show", name, "--json").document
    assert document["parameters"] is document["flops_per_token"] is None


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_whole_models_of_the_papers_have_the_keys_of_all_others(cli: Cli, name: str) -> None:
    document = cli("models", "show", name, "--json").document
    whole = WHOLE_MODELS[name].shape
    width = whole.moe.d_model
    ffn, block, table = 8 * width**2, 4 * width**2, whole.vocab_size * width
    dense = whole.num_layers - whole.num_moe_layers
    experts = whole.num_moe_layers * whole.moe.num_experts * ffn
    gates = whole.num_moe_layers * whole.moe.num_experts * width
    norms = (4 * whole.num_layers + 2) * width
    positions = whole.length * width
    assert document["parameters"] == (
        2 * table + positions + norms + whole.num_layers * block + dense * ffn + experts + gates
    )
    assert document["num_layers"] == whole.num_layers
    assert document["num_moe_layers"] == whole.num_moe_layers
    keys = width * 4096  # QK and PV over half of a causal mask
    assert document["flops_per_token"] == 6 * (whole.num_layers * (block + keys + ffn) + table)


def test_a_wrong_configuration_is_bad_input(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN3, "num_experts_per_tok": 9}))
    result = cli("models", "show", str(file), "--json")
    assert result.code == 2
    assert str(file) in result.document["error"]
    assert result.document["hint"]
