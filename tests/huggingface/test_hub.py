"""Configurations as the Hub has them: the sizes that their authors state, or a refusal by field."""

from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.huggingface.reader import read_decoder

WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
LING: dict[str, Any] = {
    "model_type": "bailing_moe", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 20, "vocab_size": 157184,
    "first_k_dense_replace": 1, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "score_function": "sigmoid",
    "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "norm_head": False,
    "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "tie_word_embeddings": False,
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
    "head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "num_experts": 64, "use_cla": False,
    "cla_share_factor": 2, "use_mixed_mlp_moe": True, "use_qk_norm": True, "norm_type": "rms",
    "moe_layer_num_skipped": 0, "n_group": False, "topk_group": False, "vocab_size": 128167,
    "tie_word_embeddings": True, "moe_drop_tokens": False, "attention_bias": False,
}  # fmt: skip
STEP: dict[str, Any] = {
    "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264,
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8,
    "head_dim": 128, "vocab_size": 128896, "sliding_window": 512,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                "num_attention_groups": 8, "head_dim": 128, "true_head_dim": 128},
    "use_head_wise_attn_gate": True, "use_moe": True, "moe_num_experts": 288, "moe_top_k": 8,
    "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_every_n_layer": 1,
    "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_layer_offset": 0,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "use_qk_norm": True,
    "norm_expert_weight": True, "need_fp32_gate": True, "use_moe_router_bias": True,
    "swiglu_limits": [0.0] * 48, "yarn_only_types": ["full_attention"],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "tie_word_embeddings": False,
}  # fmt: skip
EXAONE: dict[str, Any] = {
    "model_type": "exaone_moe", "first_last_k_dense_replace": 1, "head_dim": 128,
    "hidden_size": 6144, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": WINDOWS * 12, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
    "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
    "tokenizer_class": "GPT2Tokenizer", "topk_method": "noaux_tc", "vocab_size": 153600,
}  # fmt: skip
TRINITY: dict[str, Any] = {
    "model_type": "afmoe", "global_attn_every_n_layers": 4, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "layer_types": WINDOWS * 8,
    "load_balance_coeff": 0.001, "moe_intermediate_size": 1024, "mup_enabled": True,
    "n_group": 1, "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "num_limited_groups": 1, "num_shared_experts": 1,
    "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
    "tie_word_embeddings": False, "topk_group": 1, "vocab_size": 200192,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_text_01", "attn_type_list": ([0] * 7 + [1]) * 10, "head_dim": 128,
    "hidden_size": 6144, "intermediate_size": 9216, "layernorm_mlp_alpha": 3.55,
    "layernorm_mlp_beta": 1.0, "num_attention_heads": 64, "num_experts_per_tok": 2,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32,
    "postnorm": True, "rotary_dim": 64, "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "tie_word_embeddings": False, "vocab_size": 200064,
}  # fmt: skip
DEEPSEEK_MOE: dict[str, Any] = {
    "model_type": "deepseek", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
    "num_key_value_heads": 16, "pretraining_tp": 1, "scoring_func": "softmax", "seq_aux": True,
    "vocab_size": 102400,
}  # fmt: skip
ARCTIC: dict[str, Any] = {
    "model_type": "arctic", "hidden_size": 7168, "intermediate_size": 4864,
    "num_hidden_layers": 35, "num_attention_heads": 56, "num_key_value_heads": 8,
    "num_local_experts": 128, "num_experts_per_tok": 2, "moe_layer_frequency": 1,
    "parallel_attn_mlp_res": True, "use_residual": True, "vocab_size": 32000,
}  # fmt: skip
STATED = {
    "Ling-mini-2.0": (LING, 16.26, 1.43, "model card"),
    "Hunyuan-A13B": (HUNYUAN, 80, 13, "README of Tencent-Hunyuan/Hunyuan-A13B"),
    "Step-3.5-Flash": (STEP, 196, None, "model card"),
    "K-EXAONE-236B-A23B": (EXAONE, 236, 23, "its name"),
    "Trinity-Mini": (TRINITY, 26, None, "model card"),
    "MiniMax-Text-01": (MINIMAX, 456, None, "arXiv 2501.08313"),
    "DeepSeekMoE-16B": (DEEPSEEK_MOE, 16.4, 2.8, "arXiv 2401.06066"),
}


@pytest.mark.parametrize("name", STATED)
def test_a_hub_configuration_has_the_stated_parameters(name: str) -> None:
    document, total, active, _ = STATED[name]
    decoder = read_decoder(document, name=name, where=name)
    assert decoder.parameters.total / 1e9 == pytest.approx(total, rel=0.01)
    if active is not None:
        assert decoder.active_parameters.total / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("kind", ["arctic", "mixtral", "mixtral_res"])
def test_residual_experts_are_refused_whatever_the_type_says(kind: str) -> None:
    """Snowflake Arctic: a dense FFN beside the experts, 480 B with it."""
    with pytest.raises(InputError) as caught:
        read_decoder({**ARCTIC, "model_type": kind}, name="x", where="config.json")
    for field in ("moe_layer_frequency", "parallel_attn_mlp_res", "use_residual"):
        assert field in f"{caught.value.what} {caught.value.hint}"
    assert '"model_type"' not in caught.value.hint


@pytest.mark.parametrize(
    "changes", [{"use_mixed_mlp_moe": False}, {"moe_layer_num_skipped": 1}, {"norm_type": "layer"}]
)
def test_variants_of_hunyuan_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        read_decoder({**HUNYUAN, **changes}, name="x", where="config.json")


def test_names_of_other_software_are_translated() -> None:
    megatron = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_layers": 48,
                "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
                "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
                "padded_vocab_size": 151936}  # fmt: skip
    with pytest.raises(InputError) as caught:
        read_decoder(megatron, name="x", where="config.json")
    renamed = dict(megatron)
    for todo in caught.value.hint.split("; "):
        _, right, _, wrong = todo.split()
        renamed[right] = renamed.pop(wrong)
    total = read_decoder(renamed, name="x", where="config.json").parameters.total
    assert total / 1e9 == pytest.approx(30.5, rel=0.01)
