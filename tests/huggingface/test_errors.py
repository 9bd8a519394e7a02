"""Errors of the reader: what is wrong, where, and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.huggingface.registry import named_model, read_model, resolve_name
from tests.huggingface.configs import DEEPSEEK, NEMOTRON, QWEN3, decoder

HUNYUAN = {**QWEN3, "model_type": "hunyuan_v1_moe", "moe_topk": 2, "num_experts_per_tok": None}
GEMMA = {**QWEN3, "model_type": "gemma4_text", "top_k_experts": 2, "enable_moe_block": True}


def test_an_unknown_architecture_lists_what_was_not_understood() -> None:
    with pytest.raises(InputError) as caught:
        decoder(QWEN3, model_type="qwen9_moe", num_magic_experts=3, bos_token_id=1)
    assert "'qwen9_moe'" in caught.value.what
    for field in ("num_experts", "moe_intermediate_size", "num_magic_experts"):
        assert field in caught.value.what
    assert "bos_token_id" not in caught.value.what
    assert "qwen3_moe" in caught.value.hint


@pytest.mark.parametrize(
    "field",
    ["num_magic_experts", "moe_side_width", "shared_thing", "extra_layers", "latent_dim",
     "num_ghost_heads", "second_intermediate_size", "use_residual", "parallel_attn_mlp_res",
     "use_dense_residual", "residual_mlp", "ngram_vocab_size_ratio", "emb_split_num",
     "engram_size", "memory_slots", "temporal_layers", "embedding_rank", "norm_rank",
     "cache_experts", "rope_heads", "mup_width", "time_step_rank", "vision_experts", "chunk_ffn",
     "init_blocks", "expert_dropout_heads", "logit_adapter", "extra_token_dim",
     "add_cross_attention", "pruned_heads"],
)  # fmt: skip
@pytest.mark.parametrize("value", [3, 0.5, True, [2, 2], {"width": 3}, "wide"])
def test_a_field_that_nobody_knows_is_an_error_whatever_its_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field) as caught:
        decoder(QWEN3, **{field: value})
    assert "parameters" in caught.value.hint  # of the model without it
    decoder(QWEN3, **{field: None})  # null is as absent


def test_all_fields_in_the_way_are_in_one_message() -> None:
    with pytest.raises(InputError) as caught:
        decoder(QWEN3, num_key_value_heads=..., n_kv_heads=2, hidden_size="64",
                layer_types=["magic"] * 4, num_experts_per_tok=9, memory_slots=7,
                per_layer_config={"1": {"ffn_blocks": 2}})  # fmt: skip
    for word in ("num_key_value_heads is missing", "n_kv_heads (2)", "hidden_size", "'64'",
                 "['magic']", "memory_slots (7)", "ffn_blocks (2)"):  # fmt: skip
        assert word in caught.value.what
    assert "write num_key_value_heads for n_kv_heads" in caught.value.hint
    with pytest.raises(InputError) as caught:
        decoder(QWEN3, num_attention_heads=7, num_experts_per_tok=9, memory_slots=7)
    for word in ("num_heads (7)", "top_k (9)", "memory_slots (7)"):
        assert word in caught.value.what
    with pytest.raises(InputError) as caught:
        decoder({"model_type": "qwen3_moe"})
    for word in ("hidden_size", "vocab_size", "num_experts", "moe_intermediate_size"):
        assert word in caught.value.what
    assert "are missing" in caught.value.what


def test_fields_of_a_nested_configuration_are_accounted_for() -> None:
    nested = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4}
    kimi = {**DEEPSEEK, "model_type": "kimi_linear"}
    assert decoder(kimi, linear_attn_config=nested).num_layers == 4
    with pytest.raises(InputError, match=r"linear_attn_config\.memory_rank \(8\)"):
        decoder(kimi, linear_attn_config={**nested, "memory_rank": 8})


def test_an_architecture_is_proposed_with_the_sizes_that_it_leads_to() -> None:
    with pytest.raises(InputError) as caught:
        decoder(QWEN3, model_type="qwen3_moe_v2")
    proposed = decoder(QWEN3)
    assert '"model_type": "qwen3_moe"' in caught.value.hint
    assert f"{proposed.parameters.total / 1e9:.4g} B parameters" in caught.value.hint
    assert f"{proposed.active_parameters.total / 1e9:.4g} B active" in caught.value.hint
    with pytest.raises(InputError) as caught:
        decoder(QWEN3, model_type="qwen3_moe_v2", memory_slots=7)
    assert "write" not in caught.value.hint
    assert "memory_slots (7)" in caught.value.hint
    with pytest.raises(InputError, match="differ in their sizes") as caught:
        decoder(QWEN3, model_type="xyz")  # with and without shared experts, gates and windows
    assert "write" not in caught.value.hint
    with pytest.raises(InputError, match="no family accounts for all"):
        decoder(QWEN3, model_type="xyz", memory_slots=7)


def test_a_class_stands_for_the_type_where_that_is_missing() -> None:
    named = decoder(QWEN3, model_type=..., architectures=["Qwen3MoeForCausalLM"])
    assert named == decoder(QWEN3)
    inner = {key: value for key, value in QWEN3.items() if key != "model_type"}
    assert decoder({"model_type": "qwen3_vl_moe", "text_config": inner}).blocks == named.blocks
    with pytest.raises(InputError, match="model_type is missing"):
        decoder(QWEN3, model_type=..., architectures=["Qwen3MoeV9ForCausalLM"])


@pytest.mark.parametrize(("base", "field"), [
    (QWEN3, "model_type"), (QWEN3, "hidden_size"), (QWEN3, "num_hidden_layers"),
    (QWEN3, "num_attention_heads"), (QWEN3, "num_experts"), (QWEN3, "num_experts_per_tok"),
    (QWEN3, "moe_intermediate_size"), (QWEN3, "vocab_size"), (DEEPSEEK, "kv_lora_rank"),
    (DEEPSEEK, "intermediate_size"), (DEEPSEEK, "q_lora_rank"), (DEEPSEEK, "n_shared_experts"),
    (DEEPSEEK, "first_k_dense_replace"), (DEEPSEEK, "n_group"),
    (QWEN3, "num_key_value_heads"), (NEMOTRON, "hybrid_override_pattern"),
])  # fmt: skip
def test_a_missing_size_has_no_default(base: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"{field}.* is missing"):
        decoder(base, **{field: ...})


@pytest.mark.parametrize(("base", "changes", "words"), [
    (QWEN3, {"num_local_experts": 16}, ("num_experts (8)", "num_local_experts (16)")),
    (QWEN3, {"num_experts_per_tok": 9}, ("top_k (9)", "experts (8)")),
    (QWEN3, {"num_attention_heads": 7}, ("num_heads (7)", "num_kv_heads (2)")),
    (QWEN3, {"num_attention_heads": 6, "head_dim": ...}, ("hidden_size (64)", "(6)")),
    (QWEN3, {"mlp_layer_types": ["sparse"]}, ("mlp_layer_types", "1 entries for 4")),
    (QWEN3, {"mlp_layer_types": ["sparse"] * 3 + ["magic"]}, ("['magic']",)),
    (QWEN3, {"layer_types": ["full_attention"] * 3 + ["magic"]}, ("['magic']",)),
    (QWEN3, {"layer_types": ["linear_attention"] * 4}, ("qwen3_moe", "linear")),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 8}, ("max_window_layers",)),
    (DEEPSEEK, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
     ("first_k_dense_replace (1)", "mlp_layer_types")),
    (DEEPSEEK, {"first_k_dense_replace": 5}, ("5 dense", "4 blocks")),
    (DEEPSEEK, {"qk_head_dim": 13}, ("qk_head_dim (13)", "8 + 4")),
    (DEEPSEEK, {"n_group": 3}, ("8 experts", "3 groups")),
    (DEEPSEEK, {"topk_group": 0}, ("topk_group", "0")),
    (DEEPSEEK, {"scoring_func": "magic"}, ("'magic'",)),
    (NEMOTRON, {"hybrid_override_pattern": "MEX"}, ("['X']",)),
    (NEMOTRON, {"num_hidden_layers": 9}, ("num_hidden_layers (9)", "(4)")),
    (NEMOTRON, {"layers_block_type": ["mamba"]}, ("hybrid_override_pattern", "differ")),
    (NEMOTRON, {"layers_block_type": ["magic"]}, ("['magic']",)),
    # values of the wrong type
    (QWEN3, {"hidden_size": "64"}, ("hidden_size",)),
    (QWEN3, {"hidden_size": 0}, ("hidden_size",)),
    (QWEN3, {"num_experts": 8.0}, ("num_experts",)),
    (QWEN3, {"num_experts": True}, ("num_experts",)),
    (QWEN3, {"attention_bias": 1}, ("attention_bias",)),
    (QWEN3, {"model_type": 7}, ("model_type",)),
    (QWEN3, {"mlp_only_layers": "0"}, ("mlp_only_layers",)),
    (QWEN3, {"vocab_size": -1}, ("vocab_size",)),
    # other variants
    (QWEN3, {"use_qk_norm": False}, ("use_qk_norm is false",)),
    (QWEN3, {"position_embedding_type": "absolute"}, ("position_embedding_type",)),
    (HUNYUAN, {"use_cla": True}, ("use_cla is true",)),
    (HUNYUAN, {"num_shared_expert": [2, 1, 1, 1]}, ("num_shared_expert",)),
    (HUNYUAN, {"moe_topk": [1], "intermediate_size": ...}, ("moe_topk",)),
    (QWEN3, {"model_type": "step3p5", "moe_every_n_layer": 2}, ("moe_every_n_layer is 2",)),
    (GEMMA, {"hidden_size_per_layer_input": 8}, ("hidden_size_per_layer_input",)),
    (GEMMA, {"use_double_wide_mlp": True}, ("use_double_wide_mlp",)),
    (GEMMA, {"num_kv_shared_layers": 2}, ("num_kv_shared_layers",)),
    (QWEN3, {"model_type": "llama4_text", "intermediate_size_mlp": 8,
             "interleave_moe_layer_step": 2, "moe_layers": [0]}, ("moe_layers",)),
    (QWEN3, {"model_type": "deepseek_v4", "compress_ratios": [0, 4, 8, 4]}, ("8",)),
    (QWEN3, {"model_type": "lfm2_moe"}, ("layer_types",)),
    (DEEPSEEK, {"model_type": "kimi_linear", "linear_attn_config": {}}, ("full_attn_layers",)),
])  # fmt: skip
def test_fields_in_the_way_are_named(
    base: dict[str, Any], changes: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        decoder(base, **changes)
    assert caught.value.what.startswith("config.json")
    assert caught.value.hint
    for word in words:
        assert word in caught.value.what


def test_files_are_read_from_a_path_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(QWEN3))
    assert read_model(folder).decoder == read_model(file).decoder
    assert read_model(folder).decoder.name == "my-model"
    file.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_model(file)
    file.write_text("[]")
    with pytest.raises(InputError, match="not an object"):
        read_model(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_model(tmp_path / "none")


@pytest.mark.parametrize(("content", "words"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "Git LFS"),
    (b"PK\x03\x04rest", "zip archive"),
    (b'{"_class_name": "UNet2DConditionModel"}', r"diffusion model \(UNet2DConditionModel\)"),
    (b'{"weight_map": {}}', "index of weights"),
])  # fmt: skip
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        read_model(file)
    assert str(file) in error.value.what
    assert error.value.hint


@pytest.mark.parametrize(("spelling", "name"), [
    ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ("qwen3-next", "qwen3-next-80b-a3b"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3-70b"),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "nemotron-3-super"),
    ("ernie-4.5", "ernie-4.5-300b-a47b"),
    ("gpt_oss_120b", "gpt-oss-120b"),
    ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", "nemotron-3.5-lightning"),
    ("deepseek-v3-16b", "deepseek-v2-lite"),
])  # fmt: skip
def test_usual_spellings_of_names_are_known(spelling: str, name: str) -> None:
    assert resolve_name(spelling) == name


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert resolve_name("qwen9") is None
    with pytest.raises(InputError, match="did you mean mixtral-8x7b"):
        named_model("mixtral-8x7")
