"""A decoder as fields of Megatron-Core's `TransformerConfig`, and as arguments of its scripts.

`MegatronModel.fields` are fields of that class in core 0.16 to 0.19. `flags` are further arguments
of `megatron/training/arguments.py`. A model's sizes do not tell rotary bases and epsilons: these
come from the Hugging Face configuration if it is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moetune.domain.architecture import Decoder
from moetune.domain.attention import GroupedQueryAttention, Indexer, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.megatron_models import hybrid_symbols
from moetune.domain.recurrent import GatedDeltaNet, StateSpace
from moetune.domain.targets import MegatronCore
from moetune.export.keys import Value
from moetune.export.megatron_values import Keys, values_of

_LAYER_NORMS = frozenset({"gpt2", "nemotron"})
"""Families whose norms are LayerNorm."""
_ZERO_CENTERED = frozenset({"nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose norms store weights centred on 0 (`layernorm_zero_centered_gamma`)."""
_BALANCED_SCORES = ("sigmoid", "sqrtsoftplus")
"""Score functions for which Megatron has a router bias that balances loads."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
_ROPE_FIELDS = {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_percent"}
_ROUTER_SCALES = ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor")
_SCALED = frozenset({
    "bailing_moe", "bailing_moe_v2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_k2", "nemotron_h",
})  # fmt: skip
"""Families whose configuration scales the chosen experts' weights (`configuration_*.py`)."""
_INTERLEAVED = frozenset({"ernie4_5_moe"})
"""Families whose rotary embedding rotates adjacent pairs (Megatron-Bridge 0.6, `models/ernie`)."""
_GPT_OSS: Mapping[str, Value] = {
    "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0, "softmax_type": "learnable",
}  # fmt: skip
"""Fields of gpt-oss (Megatron-Bridge, `models/gpt_oss/gpt_oss_bridge.py`)."""
_GLM_INDEXER: Mapping[str, Value] = {
    "dsa_indexer_rope_interleaved": True, "dsa_indexer_rotate_activation": False,
    "dsa_indexer_k_norm_epsilon": 1e-6,
}  # fmt: skip
"""Fields of GLM-5's indexer (Megatron-Bridge 0.6, `models/glm_moe_dsa/glm5_bridge.py`)."""
_YARN_FIELDS = {"factor": "rotary_scaling_factor", "mscale": "mscale",
                "mscale_all_dim": "mscale_all_dim"}  # fmt: skip
_YARN_LENGTH = 4096
"""`original_max_position_embeddings` of `MLATransformerConfig`, which no argument sets."""
_YARN: Mapping[str, Value] = {
    "rotary_scaling_factor": 32.0, "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
}  # fmt: skip

_KEYS: Mapping[type, Keys] = MappingProxyType({
    Decoder: {"num_layers": "num_layers", "hidden_size": "d_model"},
    GroupedQueryAttention: {
        "num_attention_heads": "num_heads",
        "num_query_groups": "num_kv_heads",
        "kv_channels": "head_dim",
        "attention_output_gate": lambda mixer: mixer.gate_width > 0 or None,
        "add_qkv_bias": lambda mixer: (mixer.qkv_biases > 0 and not mixer.out_biases) or None,
        "qk_layernorm": lambda mixer: mixer.norm_parameters > 0 or None,
        "window_size": lambda mixer: None if mixer.window is None else (mixer.window - 1, 0),
    },
    LatentAttention: {
        "num_attention_heads": "num_heads",
        "multi_latent_attention": lambda _: True,
        "q_lora_rank": "q_rank",
        "kv_lora_rank": "kv_rank",
        "qk_head_dim": "nope_dim",
        "qk_pos_emb_head_dim": "rope_dim",
        "v_head_dim": "v_head_dim",
        # Latent attention has no use for it; without it the heads must divide the width.
        "kv_channels": "v_head_dim",
        "qk_layernorm": lambda _: True,
    },
    Indexer: {
        "experimental_attention_variant": lambda _: "dsa",
        "dsa_indexer_n_heads": "num_heads",
        "dsa_indexer_head_dim": "head_dim",
        "dsa_indexer_topk": "top_k",
        "apply_rope_fusion": lambda _: False,
    },
    GatedDeltaNet: {
        "experimental_attention_variant": lambda _: "gated_delta_net",
        "linear_conv_kernel_dim": "kernel",
        "linear_key_head_dim": "key_dim",
        "linear_value_head_dim": "value_dim",
        "linear_num_key_heads": "num_key_heads",
        "linear_num_value_heads": "num_value_heads",
    },
    StateSpace: {
        "mamba_num_heads": "num_heads",
        "mamba_head_dim": lambda mixer: mixer.d_inner // mixer.num_heads,
        "mamba_num_groups": "num_groups",
        "mamba_state_dim": "d_state",
    },
    RoutedExperts: {
        "num_moe_experts": "num_experts",
        "moe_ffn_hidden_size": "d_hidden",
        "moe_router_topk": "top_k",
        "moe_shared_expert_intermediate_size": lambda part: part.shared and part.shared.d_hidden,
        "moe_shared_expert_gate": lambda part: part.shared_gate > 0 or None,
        "moe_latent_size": "latent",
    },
    Router: {
        "moe_router_score_function":
            lambda router: "softmax" if "softmax" in router.score else router.score,
        "moe_router_pre_softmax":
            lambda router: (router.score == "softmax" and not router.is_normalized) or None,
        "moe_router_enable_expert_bias":
            lambda router: (router.has_bias and router.score in _BALANCED_SCORES) or None,
        "moe_router_num_groups":
            lambda router: router.num_groups if router.num_groups > 1 else None,
        "moe_router_group_topk":
            lambda router: router.top_groups if router.num_groups > 1 else None,
    },
})  # fmt: skip
"""Fields of `TransformerConfig`, by the attributes of a decoder and of its parts."""


@dataclass(slots=True, kw_only=True)
class MegatronModel:
    """A decoder as fields and arguments of Megatron.

    Args:
        fields: of `TransformerConfig`, or `MLATransformerConfig` with latent attention.
        flags: other arguments of the script; True for a flag without a value.
        notes: parts of the model that the arguments do not express.
    """

    fields: dict[str, Value] = field(default_factory=dict)
    flags: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is a hybrid with Mamba, which has a separate script."""
        return "is_hybrid_model" in self.fields


def megatron_model(
    decoder: Decoder, core: MegatronCore, config: Mapping[str, object], length: int
) -> MegatronModel:
    """Return the fields and arguments of a decoder that `megatron_models` allows.

    Args:
        config: configuration of Hugging Face, as far as it is known.
        length: tokens of a sequence.
    """
    model = MegatronModel(fields=values_of(_KEYS[Decoder], decoder))
    for mixer in decoder.mixers:
        model.fields |= values_of(_KEYS[type(mixer)], mixer)
        if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
            model.fields |= values_of(_KEYS[Indexer], mixer.indexer)
            model.fields |= _GLM_INDEXER if decoder.family == "glm_moe_dsa" else {}
            _share_indexers(model, decoder)
        elif isinstance(mixer, GroupedQueryAttention):
            _add_query_groups(model, mixer)
        elif isinstance(mixer, GatedDeltaNet):
            is_delta = (any(isinstance(part, GatedDeltaNet) for part in block.parts)
                        for block in decoder.blocks)  # fmt: skip
            model.fields["linear_attention_freq"] = tuple(map(int, is_delta))
    _windows(model, decoder)
    _feed_forward(model, decoder, config)
    _norms(model, decoder, config)
    _positions(model, decoder, config, length)
    if decoder.has_mamba:
        _add_hybrid_pattern(model, decoder, core)
    elif decoder.predictions:
        model.fields["mtp_num_layers"] = len(decoder.predictions)
    model.flags["vocab_size"] = decoder.vocab_size
    if not decoder.is_tied:
        model.flags["untie_embeddings_and_output_weights"] = True
    return model


def _share_indexers(model: MegatronModel, decoder: Decoder) -> None:
    """Set which blocks reuse the keys that an earlier block's indexer selects.

    After an offset, every `dsa_indexer_topk_freq`-th block selects keys (`core/transformer/
    experimental_attention_variant/dsa.py`, `is_dsa_skip_topk_layer`).
    """
    selects, num = decoder.stage_starts, decoder.num_layers
    if len(selects) == num:
        return
    offset = next(number for number in range(num) if number not in selects)
    step = next((number for number in selects if number > offset), num) - offset + 1
    if selects != tuple(n for n in range(num) if max(n + 1 - offset, 0) % step == 0):
        model.notes.append("blocks that share an indexer, which are at no equal distance")
    model.fields |= {"dsa_indexer_topk_freq": step, "dsa_indexer_skip_topk_offset": offset}


def _add_query_groups(model: MegatronModel, mixer: GroupedQueryAttention) -> None:
    """Add what the fields of grouped-query attention do not express."""
    if mixer.num_kv_heads != mixer.num_heads:
        model.flags["group_query_attention"] = True
    if mixer.norm_parameters > 2 * mixer.head_dim:
        model.notes.append(
            "norms of queries and keys over the width of all heads: Megatron norms each head"
        )


def _windows(model: MegatronModel, decoder: Decoder) -> None:
    """Set which layers have the window, where others read all tokens.

    A number n means all layers but every n-th (`core/transformer/utils.py`,
    `is_layer_window_attention`).
    """
    flags = tuple(
        int(any(getattr(part, "window", None) is not None for part in block.parts))
        for block in decoder.blocks
    )
    if 1 not in flags or 0 not in flags:
        return
    step = flags.index(0) + 1
    is_regular = flags == tuple(int(n % step > 0) for n in range(1, len(flags) + 1))
    model.fields["window_attn_skip_freq"] = step if is_regular else flags


def _feed_forward(model: MegatronModel, decoder: Decoder, config: Mapping[str, object]) -> None:
    parts = [part for kind in decoder.kinds for part in kind.parts]
    dense = next((part for part in parts if isinstance(part, DenseFfn)), None)
    routed = next((part for part in parts if isinstance(part, RoutedExperts)), None)
    ffn = routed or dense
    assert ffn is not None  # noqa: S101 - `megatron_models` allows no decoder without
    model.fields["ffn_hidden_size"] = dense.d_hidden if dense else ffn.d_hidden
    if decoder.family == "gpt_oss":
        model.flags["quick_geglu"] = True
    elif ffn.is_gated:
        model.flags["swiglu"] = True
    elif ffn.function == "relu2":
        model.flags["squared_relu"] = True
    if not ffn.biases:
        model.fields["add_bias_linear"] = False
    if routed is not None:
        _experts(model, routed, decoder)
        _scale_routing(model, decoder.family, config)


def _scale_routing(model: MegatronModel, family: str, config: Mapping[str, object]) -> None:
    """Add the router's bias, and the factor of the chosen experts' weights if it is not 1.

    Ling's configuration has a flag for whether its router has a bias.
    """
    if config.get("moe_router_enable_expert_bias") is True and (
        model.fields.get("moe_router_score_function") in _BALANCED_SCORES
    ):
        model.fields["moe_router_enable_expert_bias"] = True
    scale = next((config[name] for name in _ROUTER_SCALES if name in config), None)
    if isinstance(scale, int | float) and scale != 1:
        model.fields["moe_router_topk_scaling_factor"] = float(scale)
    elif scale is None and family in _SCALED:
        model.notes.append(
            "the factor of the chosen experts' weights, --moe-router-topk-scaling-factor, which "
            "the model's sizes do not tell"
        )


def _experts(model: MegatronModel, routed: RoutedExperts, decoder: Decoder) -> None:
    router = routed.router
    model.fields |= values_of(_KEYS[RoutedExperts], routed) | values_of(_KEYS[Router], router)
    is_routed = tuple(int(block.routed is not None) for block in decoder.blocks)
    if 0 in is_routed and not decoder.has_mamba:
        model.fields["moe_layer_freq"] = is_routed
    if router.has_bias and router.score not in _BALANCED_SCORES:
        model.notes.append(
            "the router's balance bias, which Megatron has with sigmoid scores alone"
        )


def _norms(model: MegatronModel, decoder: Decoder, config: Mapping[str, object]) -> None:
    is_layer_norm = decoder.family in _LAYER_NORMS
    model.fields["normalization"] = "LayerNorm" if is_layer_norm else "RMSNorm"
    if decoder.family in _ZERO_CENTERED:
        model.fields["layernorm_zero_centered_gamma"] = True
    epsilon = next((config[name] for name in _EPSILONS if name in config), None)
    if isinstance(epsilon, float):
        model.fields["layernorm_epsilon"] = epsilon
    else:
        model.notes.append(
            "the norms' epsilon, --norm-epsilon, which the model's sizes do not tell"
        )


def _positions(
    model: MegatronModel, decoder: Decoder, config: Mapping[str, object], length: int
) -> None:
    kinds = {"gpt2": "learned_absolute", "nemotron_h": "none", "gpt_oss": "yarn"}
    kind = kinds.get(decoder.family, "rope")
    model.flags["position_embedding_type"] = kind
    longest = config.get("max_position_embeddings")
    model.flags["max_position_embeddings"] = (
        max(longest, length) if isinstance(longest, int) else length
    )
    if decoder.family == "gpt_oss":
        model.fields |= _GPT_OSS
        model.flags |= {**_YARN, "no_yarn_correction_range_round_to_int": True}
    if kind in ("rope", "yarn"):
        _rotary(model, config)
    if decoder.family in _INTERLEAVED:
        model.flags["rotary_interleaved"] = True
    if kind == "rope":
        _add_rope_scaling(model, config)


def _rotary(model: MegatronModel, config: Mapping[str, object]) -> None:
    parameters = config.get("rope_parameters")
    values = {**config, **(parameters if isinstance(parameters, Mapping) else {})}
    for name, flag in _ROPE_FIELDS.items():
        value = values.get(name)
        if isinstance(value, int | float):
            model.flags[flag] = int(value) if name == "rope_theta" else value
    rotated, width = config.get("rotary_dim"), model.fields.get("kv_channels")
    if isinstance(rotated, int) and isinstance(width, int):
        model.flags["rotary_percent"] = rotated / width
    if "rotary_base" not in model.flags:
        model.notes.append("the rotary base, --rotary-base, which the model's sizes do not tell")


def _add_rope_scaling(model: MegatronModel, config: Mapping[str, object]) -> None:
    """Add the scaling of rotary embeddings to longer sequences (`arguments.py`).

    Megatron has arguments of YaRN for latent attention only, with an original length of 4,096. Of
    Llama 3's scaling it has only the factor.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters")
    scaling: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    match scaling.get("rope_type", scaling.get("type", "default")):
        case "default":
            return
        case "yarn" if (
            "multi_latent_attention" in model.fields
            and scaling.get("original_max_position_embeddings") == _YARN_LENGTH
        ):
            model.fields |= {
                flag: float(scaling[name]) for name, flag in _YARN_FIELDS.items() if name in scaling
            }
        case "llama3" if "factor" in scaling:
            model.flags |= {"use_rope_scaling": True, "rope_scaling_factor": scaling["factor"]}
        case kind:
            model.notes.append(f"the {kind} scaling of the rotary embedding")


def _add_hybrid_pattern(model: MegatronModel, decoder: Decoder, core: MegatronCore) -> None:
    """Add the pattern of a hybrid's layers; each letter is a separate layer."""
    pattern = "".join(map(hybrid_symbols, decoder.blocks))
    model.fields |= {"num_layers": len(pattern), "is_hybrid_model": True}
    if decoder.predictions:
        steps = ("".join(map(hybrid_symbols, step.blocks)) for step in decoder.predictions)
        pattern = "/".join([pattern, *steps])
    name = "hybrid_layer_pattern" if core >= (0, 17) else "hybrid_override_pattern"
    model.flags[name] = pattern
