"""Parameters that transformers' own classes have: the oracle of `tests/huggingface`.

`python -m benchmarks.huggingface_sizes` builds every family's class on the meta device, with sizes
that make each of its rules visible, and every named model's; it writes their configurations and
parameter counts to `tests/huggingface/sizes.json`. It needs transformers, which tests do not.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from moetune.huggingface.registry import named_model

FOLDER = Path(__file__).resolve().parent.parent
TARGET = FOLDER / "tests" / "huggingface" / "sizes.json"
MODELS = FOLDER / "moetune" / "huggingface" / "models"
_WRONG = frozenset({"longcat_flash"})
"""Their class counts the gates of experts that have no weights."""
_NESTED = (
    "thinker_config", "text_config", "llm_config", "vision_config", "audio_config", "sound_config",
    "talker_config", "code2wav_config",
)  # fmt: skip
FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"num_hidden_layers": 4}),
    ("qwen3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    ("nemotron", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    ("gpt2", {"n_layer": 4}),
    ("seed_oss", {"num_hidden_layers": 4, "mlp_bias": True}),
    ("qwen2", {"num_hidden_layers": 4}),
    ("qwen2_5_vl_text", {"num_hidden_layers": 4}),
    ("phi3", {"num_hidden_layers": 4, "num_key_value_heads": 8}),
    ("ernie4_5", {"num_hidden_layers": 4, "use_bias": True}),
    ("gemma2", {"num_hidden_layers": 4}),
    ("gemma3_text", {"num_hidden_layers": 8}),
    ("olmo2", {"num_hidden_layers": 4, "num_key_value_heads": 8}),
    ("olmo3", {"num_hidden_layers": 4, "num_key_value_heads": 8}),
    ("glm4", {"num_hidden_layers": 4, "attention_bias": True}),
    ("exaone4", {"num_hidden_layers": 4, "num_key_value_heads": 8}),
    ("hunyuan_v1_dense", {"num_hidden_layers": 4, "head_dim": 128, "pad_token_id": 0}),
    ("smollm3", {"num_hidden_layers": 4}),
    ("granite", {"num_hidden_layers": 4}),
    ("ministral3", {"num_hidden_layers": 4}),
    ("sarvam_moe", {"num_hidden_layers": 4}),
    ("sarvam_mla", {"num_hidden_layers": 4}),
    ("granitemoe_swa", {"num_hidden_layers": 4}),
    ("hy_v4_vl_text", {"num_hidden_layers": 4}),
    ("mixtral", {"num_hidden_layers": 4}),
    ("phimoe", {"num_hidden_layers": 4, "attention_bias": True, "lm_head_bias": True}),
    ("granitemoe", {"num_hidden_layers": 4}),
    ("granitemoeshared", {"num_hidden_layers": 4, "shared_intermediate_size": 512}),
    ("granitemoehybrid", {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}),
    ("gpt_oss", {"num_hidden_layers": 4}),
    ("minimax", {"num_hidden_layers": 4}),
    ("minimax_m2", {"num_hidden_layers": 4}),
    ("qwen2_moe", {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe", {"num_hidden_layers": 4, "attention_bias": True, "mlp_only_layers": [1]}),
    ("qwen3_next", {"num_hidden_layers": 8}),
    ("qwen3_5_moe_text", {"num_hidden_layers": 8}),
    ("flint", {"num_hidden_layers": 8}),
    ("laguna", {
        "num_hidden_layers": 4, "num_attention_heads_per_layer": [48, 64, 48, 64],
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }),
    ("mellum", {"num_hidden_layers": 4}),
    ("olmoe", {"num_hidden_layers": 4}),
    ("flex_olmo", {"num_hidden_layers": 4}),
    ("deepseek_v2", {
        "num_hidden_layers": 4, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "q_lora_rank": None,
    }),
    ("deepseek_v3", {"num_hidden_layers": 4, "attention_bias": True}),
    ("glm4_moe_lite", {"num_hidden_layers": 4}),
    ("axk1", {"num_hidden_layers": 4}),
    ("mistral4", {"num_hidden_layers": 4}),
    ("deepseek_v32", {"num_hidden_layers": 4}),
    ("glm_moe_dsa", {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"]}),
    ("qwen3_vl_text", {"num_hidden_layers": 4}),
    ("qwen3_5_text", {"num_hidden_layers": 8}),
    ("deepseek_v4", {"num_hidden_layers": 6}),
    ("glm4_moe", {
        "num_hidden_layers": 5, "head_dim": 128, "attention_bias": True, "use_qk_norm": True,
        "first_k_dense_replace": 3,
    }),
    ("glm4v_moe_text", {"num_hidden_layers": 4, "head_dim": 128}),
    ("dots1", {
        "num_hidden_layers": 4, "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    }),
    ("dots3_note_text", {}),
    ("exaone_moe", {"num_hidden_layers": 8}),
    ("solar_open", {"num_hidden_layers": 4}),
    ("hy_v3", {"num_hidden_layers": 4}),
    ("mimo_v2_flash", {"num_hidden_layers": 8}),
    ("beam", {"num_hidden_layers": 8}),
    ("afmoe", {"num_hidden_layers": 8}),
    ("kimi_linear", {"num_hidden_layers": 8}),
    ("bailing_hybrid", {"num_hidden_layers": 12}),
    ("ernie4_5_moe", {"num_hidden_layers": 28, "use_bias": True}),
    ("llama4_text", {"num_hidden_layers": 8, "interleave_moe_layer_step": 2}),
    ("nemotron_h", {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_latent_size": 1024,
    }),
    ("step3p5", {"num_hidden_layers": 8}),
    ("hunyuan_v1_moe", {
        "num_hidden_layers": 4, "head_dim": 128, "num_experts": 16, "moe_topk": [1, 2, 2, 4],
        "pad_token_id": 0, "attention_bias": True,
    }),
    ("jamba", {"num_hidden_layers": 8}),
    ("dbrx", {}),
    ("lfm2_moe", {
        "num_hidden_layers": 8, "layer_types": ["conv", "full_attention"] * 4, "conv_bias": True,
    }),
    ("cohere2_moe", {"num_hidden_layers": 8, "num_shared_experts": 2}),
    ("qwen3_vl_moe_text", {"num_hidden_layers": 4}),
    ("gemma4_text", {
        "num_hidden_layers": 6, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 512, "hidden_size_per_layer_input": 0,
    }),
    ("minimax_m3_vl_text", {
        "num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    }),
    ("muse_spark_text", {"num_hidden_layers": 4}),
    ("glm5_next_text", {"num_hidden_layers": 8}),
    ("hy_v4", {"num_hidden_layers": 4}),
    ("granitemoehybrid", {"num_hidden_layers": 4, "num_local_experts": 0,
                          "layer_types": ["mamba", "attention"] * 2}),
    ("jamba", {"num_hidden_layers": 8, "num_experts": 1, "num_experts_per_tok": 1}),
)  # fmt: skip
"""Families, and fields that differ from their class's."""


def main() -> None:
    """Write the file of sizes."""
    import torch
    import transformers

    done: dict[str, object] = {}
    for name, changes in FAMILIES:
        config = _config_class(name)(**changes)
        if name == "dbrx":  # its class leaves out what its attention reads
            config.attn_config.rope_theta = 1e4
        try:
            with torch.device("meta"):
                counts = _counts(config)
        except (ValueError, TypeError, AttributeError) as error:
            print(f"{name}: {error}")
            continue
        key = f"{name}, {', '.join(changes)}" if name in done else name
        done[key] = {"config": _fields(config), **counts}
        print(f"{name}: {counts}")
    named = {path.stem: _named(path) for path in sorted(MODELS.glob("*.json"))}
    document = {"transformers": transformers.__version__, "families": done, "named": named}
    TARGET.write_text(json.dumps(document, separators=(",", ":"), default=str) + "\n")


def _config_class(name: str) -> Any:  # noqa: ANN401 - transformers has its own types
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known: Any = CONFIG_MAPPING
    if name in known:
        return known[name]
    outer = {
        "dots3_note_text": "dots3_note",
        "step3p5": "step3p7",
        "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    }.get(name, name[:-5])
    config = known[outer]()
    return type(config.text_config)


def _counts(config: Any) -> dict[str, int]:  # noqa: ANN401 - as above
    """Return parameters of the class, and those of its routed experts."""
    from transformers import AutoModel, AutoModelForCausalLM

    head = 0
    try:
        model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = _text_model(config, AutoModel)
        head = (
            0
            if getattr(config, "tie_word_embeddings", False)
            else config.vocab_size * config.hidden_size
        )
    routed = sum(
        leaf.numel()
        for name, leaf in model.named_parameters()
        if ".experts." in name and not {"shared", "router", "norm"} & set(re.split(r"[._]", name))
    )
    return {"parameters": head + sum(leaf.numel() for leaf in model.parameters()), "routed": routed}


def _text_model(config: Any, auto: Any) -> Any:  # noqa: ANN401 - as above
    """Return the bare text model of a vision-language family."""
    package = type(config).__module__.rpartition(".")[0]
    stem = type(config).__name__.removesuffix("Config")
    module = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    plain = stem.replace("Text", "")
    for name in (f"{stem}Model", f"{plain}TextModel", f"{plain}ThinkerTextModel", stem):
        if hasattr(module, name):
            return getattr(module, name)(config)
    return auto.from_config(config)


def _fields(config: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    """Return the fields that the family's class writes, without those of every class."""
    from transformers import PreTrainedConfig

    every = set(PreTrainedConfig().to_dict()) - {"tie_word_embeddings", "model_type"}
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in every and (value is not None or key in {"q_lora_rank", "n_group"})
    }


def _named(path: Path) -> dict[str, int] | None:
    """Return the counts of a named model's class, None where it cannot be built as it is."""
    import torch

    values = json.loads(path.read_text())["config"]
    for nested in ("thinker_config", "text_config", "llm_config"):
        values = {**values, **values.get(nested, {})}
    family = named_model(path.stem).decoder.family
    name = {"kimi_k2": "deepseek_v3", "step3p7": "step3p5"}.get(family, family)
    if name in _WRONG:
        return None
    values = {
        key: value for key, value in values.items() if key != "model_type" and key not in _NESTED
    }
    if values.pop("topk_method", None) and name == "deepseek_v2":
        values.setdefault("topk_method", "greedy")
    values.setdefault("q_lora_rank", None) if "kv_lora_rank" in values else None
    try:
        with torch.device("meta"):
            counts = _counts(_config_class(name)(**values))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        print(f"{path.stem}: {error!r}")
        return None
    print(f"{path.stem}: {counts}")
    return counts


if __name__ == "__main__":
    main()
