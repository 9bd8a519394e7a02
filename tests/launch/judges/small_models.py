"""Small models of a family for judges: a few layers, with its own numbers of heads and experts."""

from typing import Any

SMALL = {
    "vocab_size": 1024, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_head_dim": 16, "ssm_state_size": 16, "index_head_dim": 16, "index_topk": 8,
    "intermediate_size_mlp": 64, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "sliding_window": 16,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "global_head_dim": 16, "n_embd": 64,
}  # fmt: skip
"""Sizes of the small model; heads, experts and groups stay as they are."""


LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def language_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's own part of a configuration, however deep it lies."""
    if "text_config" not in config and any(key in config for key in (*LAYERS, "layers_block_type")):
        return config
    for part in config.values():
        if isinstance(part, dict) and (found := language_of(part)):
            return found
    return {}


def small_config(config: dict[str, Any]) -> Any:
    """Return a configuration of a few layers of the family, with its own heads and experts."""
    from transformers import AutoConfig

    plain = {**config, **language_of(config)}
    plain = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    counts = [key for key in LAYERS if key in plain]
    layers = plain[counts[0]] if counts else len(plain["layers_block_type"])
    kept = kept_layers(plain, layers)
    for key, value in plain.items():
        if isinstance(value, (list, str)) and len(value) == layers:
            picked = [value[layer] for layer in kept]
            plain[key] = "".join(picked) if isinstance(value, str) else picked
        elif key in SMALL and isinstance(value, int):
            plain[key] = SMALL[key]
    plain |= dict.fromkeys(counts, len(kept))
    heads = next(plain[key] for key in ("num_attention_heads", "n_head", "n_heads") if key in plain)
    for key in ("hidden_size", "n_embd", "d_model"):
        if key in plain:
            plain[key] = 64 if "head_dim" in plain else 16 * heads
    for key in ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id"):
        plain.pop(key, None)
    return AutoConfig.for_model(plain.pop("model_type"), **plain)


def kept_layers(plain: dict[str, Any], layers: int) -> list[int]:
    """Return the ends of the model, and a layer of each kind that any list of them names."""
    kept = {0, 1, layers // 2, layers - 1}
    for value in plain.values():
        if isinstance(value, (list, str)) and len(value) == layers:
            kept |= {value.index(kind) for kind in dict.fromkeys(value)}
    return sorted(layer for layer in kept if layer < layers)
