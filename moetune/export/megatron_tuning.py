"""Modules of Megatron-Core that get adapters, and parameter names of frozen parts."""

from collections.abc import Mapping
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.recurrent import GatedDeltaNet
from moetune.domain.tuning import AdaptedParts, ModelPart

ATTENTION = ("linear_qkv", "linear_proj")
LATENT = (
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "linear_proj",
)  # fmt: skip
DELTA = ("in_proj", "out_proj")
FFNS = ("linear_fc1", "linear_fc2")
ROUTED = ("*.mlp.experts.linear_fc1", "*.mlp.experts.linear_fc2")
FROZEN_NAMES: Mapping[ModelPart, str] = MappingProxyType({
    "embedding": r"embedding\.",
    "attention": r"(self_attention|mixer)\.(?!.*layer_norm_weight)",
    "dense": r"mlp\.linear_fc[12]\.(?!layer_norm)", "router": r"mlp\.router\.",
    "experts": r"mlp\.experts\.", "shared_experts": r"mlp\.shared_experts\.",
    "norms": r"(input|pre_mlp|final)_layernorm|layer_norm_weight|final_norm",
    "head": r"output_layer\.",
})  # fmt: skip
"""Patterns of parameter names by model part; `norms` are the norms before and after the parts."""


def attention_modules(decoder: Decoder) -> tuple[str, ...]:
    """Return the modules of a model's attention, as Megatron-Core names them."""
    latent = [mixer for mixer in decoder.mixers if isinstance(mixer, LatentAttention)]
    if not latent:
        has_delta = any(isinstance(mixer, GatedDeltaNet) for mixer in decoder.mixers)
        return (*ATTENTION, *DELTA) if has_delta else ATTENTION
    absent = LATENT[:1] if latent[0].q_rank else LATENT[1:3]
    return tuple(name for name in LATENT if name not in absent)


def ffn_modules(decoder: Decoder, targets: AdaptedParts) -> tuple[str, ...]:
    """Return the modules of a model's FFNs that get adapters."""
    if targets == "attention":
        return ()
    return ROUTED if targets == "experts" and decoder.has_other_ffns else FFNS
