"""Small configurations, field by field, for tests of the reader."""

from typing import Any

from moetune.domain.architecture import Decoder
from moetune.huggingface.reader import read_decoder

QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 96, "vocab_size": 100,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96,
    "first_k_dense_replace": 1, "vocab_size": 100, "n_group": 4, "topk_group": 2,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "ME*E",
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 16, "mlp_hidden_act": "relu2",
    "vocab_size": 100,
}  # fmt: skip


def decoder(base: dict[str, Any], **changes: object) -> Decoder:
    """Read the configuration with changed fields; `...` removes one."""
    values = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    return read_decoder(values, name="model", where="config.json")
