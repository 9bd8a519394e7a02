"""Tiny random models of transformers' own classes, one of each family, in float64."""

from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 32
_COMMON: MappingProxyType[str, Any] = MappingProxyType({
    "vocab_size": VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
})  # fmt: skip
_GROUPED: MappingProxyType[str, Any] = MappingProxyType({
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 10,
    "intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_key_value_heads": 2,
})  # fmt: skip
_LATENT: MappingProxyType[str, Any] = MappingProxyType({
    "q_lora_rank": 6, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4,
})  # fmt: skip
_QWEN: MappingProxyType[str, Any] = MappingProxyType({
    "num_experts": 4, "moe_intermediate_size": 10, "intermediate_size": 16,
    "shared_expert_intermediate_size": 8, "norm_topk_prob": True,
})  # fmt: skip
FAMILIES: MappingProxyType[str, dict[str, Any]] = MappingProxyType({
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 10},
    "Qwen2Moe": {**_QWEN, "decoder_sparse_step": 2, "norm_topk_prob": False},
    "Qwen3Moe": dict(_QWEN),
    "Olmoe": {"num_experts": 4, "intermediate_size": 10, "num_key_value_heads": 2, "head_dim": 6},
    "DeepseekV2": {**_GROUPED, **_LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {**_GROUPED, **_LATENT},
    "Glm4Moe": dict(_GROUPED),
    "GptOss": {
        "num_local_experts": 4, "intermediate_size": 10, "swiglu_limit": 0.4,
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3Next": {
        **_QWEN, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    },
    "Llama4": {
        "num_local_experts": 4, "intermediate_size": 10, "intermediate_size_mlp": 16,
        "moe_layers": [1], "interleave_moe_layer_step": 2, "attn_temperature_tuning": False,
    },
})  # fmt: skip
_SPREAD = 0.3


def tiny(family: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a model of a family, with equal random parameters on every rank."""
    prefix = "Llama4Text" if family == "Llama4" else family
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **FAMILIES[family], **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # others do not compute in float64
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    return fill(model)


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw parameters large enough for choices, clamps and gradients to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.dim() > 1 or name.endswith(("bias", "sinks")):
                value.copy_(_SPREAD * torch.randn(value.shape, generator=generator))
    return model


def tokens_of(rank: int) -> torch.Tensor:
    """Return a rank's tokens; ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randint(VOCABULARY, (2, 5 + rank), generator=generator)


def loss_of(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss that reaches every logit."""
    generator = torch.Generator().manual_seed(70 + rank)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    return (logits * weights.to(logits.dtype)).sum()
