"""Rules of transformers, and of DeepSpeed, which trains its models: what of a layout they refuse.

Read in transformers 5.23 and 5.24; files are those below `transformers/`. The plans of a family
are `base_model_tp_plan` and `base_model_ep_plan` of its configuration class. DeepSpeed is read in
0.19.8.
"""

from types import MappingProxyType

from moetune.domain.rules import Asked, Rule, indivisible

ABSENT = frozenset({
    "bailing_moe", "bailing_moe_v2", "deepseek", "grok-1", "kimi_k2", "longcat_flash_ngram", "mimo",
    "minimax_m3", "minimax_text_01",
})  # fmt: skip
"""Families without a class of their own: their configurations name code on the Hub."""
NO_CAUSAL_CLASS = frozenset({
    "glm4v_moe_text", "glm5_next_text", "hy_v4_vl_text", "mistral4", "muse_spark_text",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text", "qwen3_vl_text", "step3p5", "step3p7",
})  # fmt: skip
"""Families whose configuration `AutoModelForCausalLM`, which the export calls, does not take."""
_TOWERS_ON_THE_HUB = frozenset({"kimi_linear", "minimax_m3_vl_text", "nemotron_h"})
"""Families of language models that have towers under types which transformers does not have."""
CUTS_ATTENTION = frozenset({
    "llama", "mistral", "nemotron", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "laguna", "mellum",
    "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "glm4_moe", "glm4v_moe_text",
    "dots1", "exaone_moe", "solar_open", "hy_v3", "mimo_v2_flash", "beam", "ernie4_5_moe",
    "llama4_text", "longcat_flash", "cohere2_moe", "dots3_note_text", "hy_v4", "gemma4_text",
})  # fmt: skip
"""Families whose tensor plan cuts every mixer by heads; others leave attention whole on each rank,
or gather what their projections give (`colwise_gather_output`)."""
WITHOUT_EXPERT_PLAN = frozenset({"llama4_text", "longcat_flash", "dbrx"})
"""Families with experts whose expert plan is empty."""

READS_IN_PARTS = frozenset({"bailing_hybrid", "kimi_linear"})
"""Families whose convolution is read from three tensors, one behind the other in the dimension that
FSDP cuts. A rank reads its part of each of the three, which together are another part of the whole
(`conversion_mapping.py`, `distributed/sharding_utils.py`)."""


AUTOEP: MappingProxyType[str, str] = MappingProxyType({
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "minimax_m3_vl_text": "minimax_m3",
})  # fmt: skip
"""AutoEP's presets by the model's family (`module_inject/auto_ep_presets/`)."""
AUTOTP = frozenset({"llama", "mistral", "nemotron", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"})
"""Families whose heads AutoTP cuts; it has no gradient of rotary keys that latent attention shares,
and none of delta nets (`module_inject/tp_plan_converter.py`)."""


def key_heads(source: str) -> Rule:
    """Return the rule of numbers of key heads that tensor parallelism does not divide."""
    return Rule(
        "tp {layout.tp} with {found[0]} key heads", "--tp {found[1]}", source,
        lambda asked: indivisible(asked.decoder.kv_head_counts, asked.layout.tp),
    )  # fmt: skip


def _cuts_experts(asked: Asked, families: frozenset[str]) -> bool:
    """Return whether tensor parallelism cuts experts, too: without expert parallelism it does."""
    has_experts = asked.decoder.num_moe_layers > 0 and asked.decoder.family in families
    return asked.layout.tp > 1 and asked.layout.ep == 1 and has_experts


TRANSFORMERS = (
    Rule("ep {layout.ep}: the expert plan of {decoder.family} is empty", "--ep 1",
         "distributed/mixin.py",
         lambda asked: asked.layout.ep > 1 and asked.decoder.family in WITHOUT_EXPERT_PLAN),
    Rule("dp {layout.dp}: the convolutions of {decoder.family} load in another order",
         "--world-size 1", "distributed/sharding_utils.py",
         lambda asked: asked.layout.dp > 1 and asked.decoder.family in READS_IN_PARTS),
    Rule("tp {layout.tp}: the tensor plan of {decoder.family} leaves attention whole", "--tp 1",
         "configuration class, base_model_tp_plan",
         lambda asked: asked.layout.tp > 1 and asked.decoder.family not in CUTS_ATTENTION),
    Rule("tp {layout.tp} with ep 1: its tensor plan cuts the experts, too",
         "--ep {layout.tp}, or --tp 1", "distributed/mixin.py",
         lambda asked: _cuts_experts(asked, CUTS_ATTENTION)),
    key_heads("distributed/tensor_parallel.py"),
)  # fmt: skip
TRANSFORMERS_MODELS = (
    Rule("{decoder.name}: transformers has no class for {decoder.family}", "--target megatron",
         "models/auto/configuration_auto.py", lambda asked: asked.decoder.family in ABSENT),
    Rule("{decoder.name}: AutoModelForCausalLM has no class for it", "a model of text alone",
         "models/auto/modeling_auto.py",
         lambda asked: asked.decoder.family in NO_CAUSAL_CLASS
         or (asked.decoder.uncounted and asked.decoder.family in _TOWERS_ON_THE_HUB)),
)  # fmt: skip
DEEPSPEED = (
    Rule("ep {layout.ep}: AutoEP has no preset for {decoder.family}", "--ep 1",
         "module_inject/auto_ep_presets/registry.py",
         lambda asked: asked.layout.ep > 1 and asked.decoder.family not in AUTOEP),
    Rule("tp {layout.tp}: AutoTP does not cut the attention of {decoder.family}", "--tp 1",
         "module_inject/tp_plan_converter.py",
         lambda asked: asked.layout.tp > 1 and asked.decoder.family not in AUTOTP),
    Rule("tp {layout.tp} with ep 1: AutoEP with AutoTP asks for autoep_size above 1",
         "--ep above 1, or --tp 1", "module_inject/auto_ep_folding.py",
         lambda asked: _cuts_experts(asked, AUTOTP)),
    key_heads("runtime/engine.py"),
)  # fmt: skip
