"""Parameters against those of transformers' own classes, built on the meta device.

`benchmarks/huggingface_sizes.py` writes them; its configurations are as transformers 5 saves them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.huggingface.reader import read_decoder
from moetune.huggingface.registry import model_names, named_model

SIZES = json.loads((Path(__file__).parent / "sizes.json").read_text(encoding="utf-8"))
STATED: dict[str, tuple[float, float | None, str]] = {
    "grok-1": (314, None, "README.md of xai-org/grok-1"),
    "kimi-k3": (2780, None, "model card of moonshotai/Kimi-K3"),
    "ling-lite-1.5": (16.8, 2.75, "model card of inclusionAI/Ling-lite-1.5"),
    "ling-mini-2.0": (16.26, 1.43, "model card of inclusionAI/Ling-mini-2.0"),
    "ling-flash-2.0": (100, 6.1, "model card of inclusionAI/Ling-flash-2.0"),
    "longcat-flash": (560, 27, "arXiv 2509.01322"),
    "longcat-flash-lite": (68.5, None, "model card of meituan-longcat/LongCat-Flash-Lite"),
}
"""Billions of parameters, of them active, and who says so: transformers has no class for these."""
ROUNDED = {"ling-flash-2.0": 0.03}
"""Relative rounding of totals that are stated with a digit alone; else 1 %."""
WITH_LATENT = {"nemotron_h", "muse_spark_text", "nemotron-3-super"}


def _latent(part: Any) -> int:
    return 0 if part.latent is None else 2 * part.d_model * part.latent + part.latent_biases


@pytest.mark.parametrize("name", SIZES["families"])
def test_a_family_has_the_parameters_of_its_class(name: str) -> None:
    expected = SIZES["families"][name]
    decoder = read_decoder(expected["config"], name=name, where=name)
    latent = sum(_latent(block.routed) for block in decoder.blocks if block.routed is not None)
    assert decoder.parameters.total == expected["parameters"]
    assert decoder.parameters.routed - latent == expected["routed"]
    assert bool(latent) == (name in WITH_LATENT)


@pytest.mark.parametrize("name", [name for name in model_names() if name not in STATED])
def test_a_named_model_has_the_parameters_of_its_class(name: str) -> None:
    expected = SIZES["named"][name]
    decoder = named_model(name).decoder
    latent = sum(_latent(block.routed) for block in decoder.blocks if block.routed is not None)
    assert decoder.parameters.total == expected["parameters"]
    assert decoder.parameters.routed - latent == expected["routed"]


@pytest.mark.parametrize("name", STATED)
def test_a_model_without_a_class_has_the_stated_parameters(name: str) -> None:
    total, active, _ = STATED[name]
    decoder = named_model(name).decoder
    assert decoder.parameters.total / 1e9 == pytest.approx(total, rel=ROUNDED.get(name, 0.01))
    if active is not None:
        assert decoder.active_parameters.total / 1e9 == pytest.approx(active, rel=0.05)


def test_a_configuration_of_the_authors_code_has_the_sizes_of_transformers() -> None:
    other = {
        "model_type": "bailing_hybrid", "vocab_size": 157184, "hidden_size": 2560,
        "intermediate_size": 6144, "num_hidden_layers": 42, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "layer_group_size": 6,
        "first_k_dense_replace": 2, "num_experts": 512, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 768, "tie_word_embeddings": False,
        "moe_shared_expert_intermediate_size": 768, "num_nextn_predict_layers": 1,
        "gated_attention_proj_granularity_type": "head_wise", "no_kda_lora": True,
        "short_conv_kernel_size": 4, "kda_safe_gate": True, "use_qk_norm": True,
    }  # fmt: skip
    decoder = read_decoder(other, name="ling", where="ling")
    assert decoder.parameters.total == SIZES["named"]["ling-3.0-flash"]["parameters"]
    with pytest.raises(InputError, match="no_kda_lora"):
        read_decoder(other | {"no_kda_lora": False}, name="ling", where="ling")


def test_every_named_model_has_an_oracle() -> None:
    assert set(SIZES["named"]) == set(model_names())
    assert {name for name, counts in SIZES["named"].items() if counts is None} == set(STATED)
