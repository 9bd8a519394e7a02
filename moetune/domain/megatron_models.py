"""Models that Megatron-LM's arguments describe: `pretrain_gpt.py`, and hybrids' own script.

Read in `megatron/training/arguments.py`, `gpt_builders.py` and `core/transformer/
transformer_config.py` of core_v0.16.1 to core_v0.19.0. A family that is not named has parts that
no argument says, such as multipliers of residuals; a named one may still have sizes that differ
from layer to layer.
"""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.architecture import Block, Decoder, Mixer
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.layout import BrokenRule
from moetune.domain.recurrent import GatedDeltaNet, StateSpace
from moetune.domain.targets import MegatronCore, Target

_FIRST: MegatronCore = (0, 16)
_HYBRID_PREDICTIONS: MegatronCore = (0, 17)
FAMILIES: MappingProxyType[str, MegatronCore] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "gpt2", "nemotron", "mixtral", "qwen2_moe",
             "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "olmoe",
             "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
             "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "minimax_m2", "qwen3_next",
             "qwen3_5_moe_text", "qwen3_5_text", "bailing_moe", "bailing_moe_v2",
             "hunyuan_v1_moe", "hy_v3",
             "dots1", "nemotron_h"),
            _FIRST,
        ),
        "glm_moe_dsa": (0, 19),
        "gpt_oss": (0, 19),
    }
)  # fmt: skip
"""Families, and the first core whose arguments describe them.

DSA that shares an indexer among layers has `--dsa-indexer-topk-freq` from 0.19 on; gpt-oss' YaRN
has arguments (`--yarn-original-max-position-embeddings`) from 0.19 on.
"""
_SYMBOLS = MappingProxyType({StateSpace: "M", GroupedQueryAttention: "*", RoutedExperts: "E",
                             DenseFfn: "-"})  # fmt: skip
"""Letters of `--hybrid-layer-pattern` (`core/ssm/mamba_hybrid_layer_allocation.py`)."""


def megatron_models(decoder: Decoder, target: Target) -> Iterator[BrokenRule]:
    """Yield what of a model the arguments of Megatron-LM cannot describe."""
    core = target.core or _FIRST
    since = FAMILIES.get(decoder.family)
    instead = "a model of another family"
    if since is None:
        what = f"{decoder.name}: its arguments do not describe the family {decoder.family}"
        yield target.refusal(what, instead, "megatron/training/arguments.py")
    elif core < since:
        release = ".".join(map(str, since))
        yield target.refusal(
            f"{decoder.name}, whose family {decoder.family} has arguments from core {release} on",
            f"--target megatron@{release}", "megatron/training/arguments.py",
        )  # fmt: skip
    elif decoder.has_mamba and decoder.predictions and core < _HYBRID_PREDICTIONS:
        yield target.refusal(
            f"{decoder.name}: multi-token prediction of a hybrid with Mamba", "--target "
            "megatron@0.17", "core/models/mamba/mamba_model.py",
        )  # fmt: skip
    elif problem := _problem(decoder):
        yield target.refusal(f"{decoder.name}: {problem}", instead, "gpt_builders.py")


def hybrid_symbols(block: Block) -> str:
    """Return a hybrid's block in the letters of `--hybrid-layer-pattern`, one for each part."""
    return "".join(_SYMBOLS[type(part)] for part in block.parts)


def _problem(decoder: Decoder) -> str:
    """Return what of a model's blocks no argument says; "" where all is said."""
    for block in decoder.kinds:
        if block.streams > 1:
            return f"blocks of {block.streams} residual streams"
        for part in block.parts:
            if isinstance(part, RoutedExperts) and part.num_zero_experts:
                return "experts that return their input"
            if not isinstance(part, DenseFfn | RoutedExperts) and (odd := _odd(part)):
                return odd
    if len({block.with_record(None).routed for block in decoder.kinds if block.routed}) > 1:
        return "experts that differ from layer to layer"
    if len(_sizes_of_mixers(decoder)) > len({type(mixer) for mixer in decoder.mixers}):
        return "attention whose sizes differ from layer to layer"
    dense = {part for block in decoder.kinds for part in block.parts if isinstance(part, DenseFfn)}
    return "dense FFNs that differ from layer to layer" if len(dense) > 1 else ""


def _odd(mixer: Mixer) -> str:
    match mixer:
        case GroupedQueryAttention(chunk=None, has_value_projection=True):
            return "" if mixer.head_dim == mixer.v_head_dim else "values of another width than keys"
        case LatentAttention(gate_width=0, window=None, biases=0):
            return ""
        case GatedDeltaNet(gate_rank=0):
            return ""
        case StateSpace(rank=0):
            return ""
        case _:
            return f"a block of {mixer.name}"


def _sizes_of_mixers(decoder: Decoder) -> set[tuple[object, ...]]:
    """Return the sizes of each kind of mixer, whatever window or indexer it has."""
    return {
        (type(mixer), mixer.parameters - getattr(getattr(mixer, "indexer", None), "parameters", 0))
        for mixer in decoder.mixers
    }
