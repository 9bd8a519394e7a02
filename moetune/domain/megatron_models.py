"""Models that Megatron-LM's arguments describe, and those that Megatron-Bridge trains.

Read in `megatron/training/arguments.py`, `gpt_builders.py` and `core/transformer/
transformer_config.py` of core_v0.16.1 to core_v0.19.0. A family that is not listed has parts that
no argument describes, such as multipliers of residuals. A listed family may still have sizes that
differ from layer to layer.

Megatron-Bridge has recipes by name, and bridges by family (`src/megatron/bridge/recipes` and
`models/*/*_bridge.py` of v0.3.1, v0.4.2, v0.5.1 and v0.6.0). A model with a bridge and without a
recipe is made from its configuration.
"""

from types import MappingProxyType
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder, Mixer
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.recurrent import GatedDeltaNet, StateSpace
from moetune.domain.rules import FIRST_CORE, Asked, Rule
from moetune.domain.targets import MegatronCore, Target

_DESCRIBED: MappingProxyType[str, MegatronCore] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "gpt2", "nemotron", "mixtral", "qwen2_moe",
             "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "olmoe",
             "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
             "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "minimax_m2", "qwen3_next",
             "qwen3_5_moe_text", "qwen3_5_text", "bailing_moe", "bailing_moe_v2",
             "hunyuan_v1_moe", "hy_v3",
             "dots1", "nemotron_h"),
            FIRST_CORE,
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


def hybrid_symbols(block: Block) -> str:
    """Return a hybrid's block in letters of `--hybrid-layer-pattern`, a letter for each part."""
    return "".join(_SYMBOLS[type(part)] for part in block.parts)


def _problem(decoder: Decoder) -> str:
    """Return the property of a model's blocks that no argument describes; "" if there is none."""
    for block in decoder.kinds:
        if block.streams > 1:
            return f"blocks of {block.streams} residual streams"
        for part in block.parts:
            if isinstance(part, RoutedExperts) and part.num_zero_experts:
                return "experts that return their input"
            if isinstance(part, DenseFfn | RoutedExperts):
                odd = _odd_ffn(decoder, part)
            else:
                odd = _odd(part)
            if odd:
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


def _odd_ffn(decoder: Decoder, part: DenseFfn | RoutedExperts) -> str:
    functions = ("silu", "swish") if part.is_gated else ("relu2", "gelu", "gelu_new")
    if part.function not in functions:
        return f"{'gates' if part.is_gated else 'FFNs'} of {part.function}"
    outputs = {getattr(mixer, "out_biases", 0) > 0 for mixer in decoder.mixers}
    if outputs - {part.biases > 0} and not decoder.has_mamba:
        return "biases of attention's output or of the FFNs, but not of both"
    return ""


def _sizes_of_mixers(decoder: Decoder) -> set[tuple[object, ...]]:
    """Return the sizes of each kind of mixer, without regard to windows and indexers."""
    return {
        (type(mixer), mixer.parameters - getattr(getattr(mixer, "indexer", None), "parameters", 0))
        for mixer in decoder.mixers
    }


_BRIDGES = "megatron/bridge/models"


class BridgeRecipe(NamedTuple):
    """A recipe of Megatron-Bridge.

    Args:
        package: package in `megatron.bridge.recipes`.
        function: function that returns the configuration; its name ends in `_config`.
        since: core of the first version of Megatron-Bridge with the recipe.
    """

    package: str
    function: str
    since: MegatronCore = (0, 16)


def _recipes(package: str, since: MegatronCore, **names: str) -> dict[str, BridgeRecipe]:
    return {
        name: BridgeRecipe(package, f"{function}_config", since) for function, name in names.items()
    }


RECIPES: MappingProxyType[str, BridgeRecipe] = MappingProxyType(
    {
        **_recipes(
            "deepseek", (0, 16), deepseek_v2_lite_pretrain="deepseek-v2-lite",
            deepseek_v2_pretrain="deepseek-v2", deepseek_v3_pretrain="deepseek-v3",
        ),
        **_recipes(
            "deepseek", (0, 18), deepseek_v4_flash_pretrain="deepseek-v4-flash",
            deepseek_v4_pro_pretrain="deepseek-v4-pro",
        ),
        **_recipes("glm", (0, 16), glm45_355b_pretrain="glm-4.5",
                   glm45_air_106b_pretrain="glm-4.5-air"),
        **_recipes("glm.h100", (0, 19), glm52_pretrain_416gpu_h100_bf16="glm-5.2"),
        **_recipes("gpt_oss", (0, 16), gpt_oss_20b_pretrain="gpt-oss-20b",
                   gpt_oss_120b_pretrain="gpt-oss-120b"),
        **_recipes("kimi.kimi_k2", (0, 16), kimi_k2_pretrain="kimi-k2"),
        **_recipes("moonlight", (0, 16), moonlight_16b_pretrain="moonlight"),
        **_recipes(
            "llama", (0, 16), llama2_7b_pretrain="llama-2-7b", llama3_8b_pretrain="llama-3-8b",
            llama3_70b_pretrain="llama-3-70b", llama31_405b_pretrain="llama-3-405b",
        ),
        **_recipes("nemotronh", (0, 16), nemotron_3_nano_pretrain="nemotron-3-nano"),
        **_recipes("nemotronh", (0, 17), nemotron_3_super_pretrain="nemotron-3-super"),
        **_recipes("nemotronh", (0, 18), nemotron_3_ultra_pretrain="nemotron-3-ultra"),
        **_recipes("nemotronh.h100", (0, 19),
                   nemotron_3_5_lightning_pretrain="nemotron-3.5-lightning",
                   nemotron_3_nano_4b_pretrain_8gpu_h100_bf16="nemotron-3-nano-4b"),
        **_recipes("olmoe", (0, 16), olmoe_7b_pretrain="olmoe"),
        **_recipes(
            "qwen", (0, 16), qwen3_600m_pretrain="qwen3-0.6b", qwen3_1p7b_pretrain="qwen3-1.7b",
            qwen3_4b_pretrain="qwen3-4b", qwen3_8b_pretrain="qwen3-8b",
            qwen3_14b_pretrain="qwen3-14b", qwen3_32b_pretrain="qwen3-32b",
            qwen3_30b_a3b_pretrain="qwen3-30b-a3b", qwen3_235b_a22b_pretrain="qwen3-235b-a22b",
            qwen3_next_80b_a3b_pretrain="qwen3-next-80b-a3b",
        ),
        **_recipes("qwen", (0, 19),
                   qwen35_text_35b_a3b_pretrain_8gpu_gb200_bf16="qwen3.5-35b-a3b"),
    }
)  # fmt: skip
"""Recipes by the model's name in the registry."""
_BRIDGED: MappingProxyType[str, MegatronCore] = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "nemotron",
             "nemotron_h", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
             "kimi_k2"),
            (0, 16),
        ),
        "minimax_m2": (0, 17),
        **dict.fromkeys(
            ("bailing_moe_v2", "deepseek_v4", "ernie4_5_moe", "glm4_moe_lite", "glm_moe_dsa",
             "mimo_v2_flash", "qwen3_5_text", "qwen3_5_moe_text", "step3p5", "gemma4_text"),
            (0, 18),
        ),
        **dict.fromkeys(("exaone_moe", "hy_v3"), (0, 19)),
    }
)  # fmt: skip
"""Families with a bridge from their configuration, and the core of the bridge's first version."""
TEXT_CLASSES: MappingProxyType[str, str] = MappingProxyType({
    "gemma4_text": "Gemma4ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
})  # fmt: skip
"""Families whose language model has a separate bridge without towers, and the class that the bridge
is registered for. The recipe of Qwen3.5's text (`recipes/qwen/gb200/qwen35.py` of 0.6) gives this
class to `AutoBridge.from_hf_config`."""
_WITH_TOWERS: MappingProxyType[str, str] = MappingProxyType({
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_vl_text", "qwen2_5_vl_text"), "qwen_vl"),
    "qwen3_omni_moe_text": "qwen_omni", "glm4v_moe_text": "glm_vl", "step3p7": "stepfun",
    "minimax_m3_vl_text": "minimax_m3", "nemotron_h": "nemotron_omni",
})  # fmt: skip
"""Families whose towers, where a model has some, Bridge always makes, too; and its package."""
_BRIDGES_OF_CORES: MappingProxyType[MegatronCore, str] = MappingProxyType(
    {(0, 16): "0.3", (0, 17): "0.4", (0, 18): "0.5", (0, 19): "0.6"}
)


def _family(decoder: Decoder) -> str:
    """Return the family, or "bailing_moe_v2" for Ling 2.0, whose configuration has Ling 1.5's type.

    Ling 2.0 has another class, with norms of queries and keys (`bailing/bailing_moe2_bridge.py`).
    """
    has_norms = any(getattr(mixer, "norm_parameters", 0) for mixer in decoder.mixers)
    return "bailing_moe_v2" if decoder.family == "bailing_moe" and has_norms else decoder.family


def recipe_of(decoder: Decoder, target: Target) -> BridgeRecipe | None:
    """Return the recipe of a model of the registry; None where the version has none."""
    recipe = RECIPES.get(decoder.name)
    has_recipe = recipe is not None and recipe.since <= (target.core or FIRST_CORE)
    return recipe if has_recipe else None


def _described_later(asked: Asked) -> str:
    """Return the first release whose arguments describe the model; "" unless it is later."""
    since = _DESCRIBED.get(asked.decoder.family, FIRST_CORE)
    return ".".join(map(str, since)) if asked.core < since else ""


def _bridged_later(asked: Asked) -> str:
    """Return the first release with a bridge of the model's family; "" unless it is later."""
    since = _BRIDGED.get(_family(asked.decoder), FIRST_CORE)
    return _BRIDGES_OF_CORES[since] if asked.core < since and not _bound_towers(asked) else ""


def _has_hybrid_predictions(asked: Asked) -> bool:
    return asked.decoder.has_mamba and bool(asked.decoder.predictions)


def _bound_towers(asked: Asked) -> tuple[str, str] | None:
    """Return the towers that the bridge makes with the model, and its package; None without."""
    decoder, package = asked.decoder, _WITH_TOWERS.get(asked.decoder.family)
    has_text = decoder.family in TEXT_CLASSES or recipe_of(decoder, asked.target) is not None
    if not decoder.uncounted or has_text or not (package or _family(decoder) in _BRIDGED):
        return None
    return " and ".join(decoder.uncounted), package or "*_vl"


_ARGUMENTS = "megatron/training/arguments.py"
_OTHER_FAMILY = "a model of another family"
_HYBRID = "{decoder.name}: multi-token prediction of a hybrid with Mamba"
MEGATRON_MODELS = (
    Rule("{decoder.name}: its arguments do not describe the family {decoder.family}", _OTHER_FAMILY,
         _ARGUMENTS, lambda asked: asked.decoder.family not in _DESCRIBED),
    Rule("{decoder.name}, whose family {decoder.family} has arguments from core {cause} on",
         "--target megatron@{cause}", _ARGUMENTS, _described_later),
    Rule(_HYBRID, "--target megatron@0.17", "core/models/mamba/mamba_model.py",
         lambda asked: asked.decoder.family in _DESCRIBED and not _described_later(asked)
         and _has_hybrid_predictions(asked), before=(0, 17)),
    Rule("{decoder.name}: {cause}", _OTHER_FAMILY, "gpt_builders.py",
         lambda asked: asked.decoder.family in _DESCRIBED and not _described_later(asked)
         and not (_has_hybrid_predictions(asked) and asked.core < (0, 17))
         and _problem(asked.decoder)),
)  # fmt: skip
"""Models that the arguments of Megatron-LM cannot describe."""
BRIDGE_MODELS = (
    Rule("{decoder.name} without its {cause[0]}, which its bridge makes, too, and no plan counts",
         "a model of text alone", f"{_BRIDGES}/{{cause[1]}}", _bound_towers),
    Rule("{decoder.name}: it has no recipe for it, and no bridge of the family {decoder.family}",
         _OTHER_FAMILY, _BRIDGES, lambda asked: _family(asked.decoder) not in _BRIDGED
         and not _bound_towers(asked)),
    Rule("{decoder.name}: {decoder.family} has a bridge from {cause} on", "--target bridge@{cause}",
         _BRIDGES, _bridged_later),
    Rule("{decoder.name}, whose blocks share indexers", "--target bridge@0.6",
         f"{_BRIDGES}/glm_moe_dsa", lambda asked: asked.core == (0, 18)
         and len(asked.decoder.stage_starts) < asked.decoder.num_layers),
    Rule(_HYBRID, "--target bridge@0.4", "megatron/core/models/mamba/mamba_model.py",
         lambda asked: not _bound_towers(asked) and _family(asked.decoder) in _BRIDGED
         and _has_hybrid_predictions(asked), before=(0, 17)),
)  # fmt: skip
"""Models that a version of Megatron-Bridge does not support."""
