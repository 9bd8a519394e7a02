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
    "first_k_dense_replace": 1, "swa_head_dim": 16, "swa_v_head_dim": 16, "global_head_dim": 16,
    "n_embd": 64, "n_inner": 64,
}  # fmt: skip
"""Sizes of the small model, whose second layer has experts; heads, experts and groups stay."""


LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
PARTS = ("attn_config", "ffn_config")
"""Parts of a configuration that the language model's own class reads."""
PERIODS = ("attn_layer_period", "full_attention_interval", "layer_group_size")
"""Fields that count the layers of which the last attends, or one at an offset."""


def language_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's own part of a configuration, however deep it lies."""
    if "text_config" not in config and any(key in config for key in (*LAYERS, "layers_block_type")):
        return config
    for part in config.values():
        if isinstance(part, dict) and (language := language_of(part)):
            return language
    return {}


def small_config(config: dict[str, Any]) -> Any:
    """Return a configuration of a few layers of the family, with its own heads and experts."""
    from transformers import AutoConfig

    plain = {**config, **language_of(config)}
    plain = {
        key: value for key, value in plain.items() if not isinstance(value, dict) or key in PARTS
    }
    counts = [key for key in LAYERS if key in plain]
    layers = plain[counts[0]] if counts else len(plain["layers_block_type"])
    kept = kept_layers(plain, layers)
    for key, value in plain.items():
        if isinstance(value, (list, str)) and len(value) == layers:
            picked = [value[layer] for layer in kept]
            plain[key] = "".join(picked) if isinstance(value, str) else picked
    plain = small_sizes(plain) | dict.fromkeys(counts, len(kept))
    heads = next(plain[key] for key in ("num_attention_heads", "n_head", "n_heads") if key in plain)
    for key in ("hidden_size", "n_embd", "d_model"):
        if key in plain:
            is_free = {"head_dim", "kv_lora_rank"} & set(plain)  # a few classes ask for a multiple
            plain[key] = -(-64 // heads) * heads if is_free else 16 * heads
    if "mamba_d_head" in plain:  # of as many heads, whose width the class checks
        plain["mamba_d_head"] = (
            plain["mamba_expand"] * plain["hidden_size"] // plain["mamba_n_heads"]
        )
    for key in ("quantization_config", "eos_token_id", "bos_token_id"):
        plain.pop(key, None)
    plain["pad_token_id"] = None  # a class may have one beyond the small vocabulary
    return AutoConfig.for_model(plain.pop("model_type"), **plain)


def small_sizes(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the sizes of `SMALL`, in its parts, too."""
    changed = dict(plain)
    for key, value in plain.items():
        if isinstance(value, dict):
            changed[key] = small_sizes(value)
        elif key in SMALL and isinstance(value, int):
            changed[key] = SMALL[key]
    return changed


def kept_layers(plain: dict[str, Any], layers: int) -> list[int]:
    """Return the ends of the model, and a layer of each kind that any list of them names.

    Where a period says which layers attend, they are the first layers of one period.
    """
    if periods := [plain[key] for key in PERIODS if key in plain]:
        return list(range(min(max(periods), layers)))
    kept = {0, 1, layers - 1}
    for value in plain.values():
        if isinstance(value, (list, str)) and len(value) == layers:
            kept |= {value.index(kind) for kind in dict.fromkeys(value)}
    return sorted(layer for layer in kept if layer < layers)
