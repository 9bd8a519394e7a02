"""Rules of transformers, and of DeepSpeed, which trains its models: what of a layout they refuse.

Read in transformers 5.23 and 5.24; files are those below `transformers/`. The plans of a family
are `base_model_tp_plan` and `base_model_ep_plan` of its configuration class. DeepSpeed is read in
0.19.8.
"""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.layout import BrokenRule, nearest_divisors
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob

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


def transformers_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job transformers refuses, beyond `layout_rules`."""
    del site
    decoder = job.decoder
    if layout.ep > 1 and decoder.family in WITHOUT_EXPERT_PLAN:
        what = f"ep {layout.ep}: the expert plan of {decoder.family} is empty"
        yield target.refusal(what, "--ep 1", "distributed/mixin.py")
    if layout.dp > 1 and decoder.family in READS_IN_PARTS:
        what = f"dp {layout.dp}: the convolutions of {decoder.family} load in another order"
        yield target.refusal(what, "--world-size 1", "distributed/sharding_utils.py")
    if layout.tp == 1:
        return
    if decoder.family not in CUTS_ATTENTION:
        what = f"tp {layout.tp}: the tensor plan of {decoder.family} leaves attention whole"
        yield target.refusal(what, "--tp 1", "configuration class, base_model_tp_plan")
    elif decoder.num_moe_layers and layout.ep == 1:
        what = f"tp {layout.tp} with ep 1: its tensor plan cuts the experts, too"
        yield target.refusal(what, f"--ep {layout.tp}, or --tp 1", "distributed/mixin.py")
    yield from key_head_rules(layout, target, decoder, "distributed/tensor_parallel.py")


def transformers_models(decoder: Decoder, target: Target) -> Iterator[BrokenRule]:
    """Yield that a model's family has no class in transformers."""
    if decoder.family in ABSENT:
        what = f"{decoder.name}: transformers has no class for {decoder.family}"
        yield target.refusal(what, "--target megatron", "models/auto/configuration_auto.py")
    has_towers = decoder.uncounted and decoder.family in _TOWERS_ON_THE_HUB
    if decoder.family in NO_CAUSAL_CLASS or has_towers:
        what = f"{decoder.name}: AutoModelForCausalLM has no class for it"
        yield target.refusal(what, "a model of text alone", "models/auto/modeling_auto.py")


def key_head_rules(
    layout: FoldedLayout, target: Target, decoder: Decoder, source: str
) -> Iterator[BrokenRule]:
    """Yield the numbers of key heads that tensor parallelism does not divide."""
    for count in decoder.kv_head_counts:
        if count % layout.tp:
            near = " or ".join(map(str, nearest_divisors(count, layout.tp)))
            what = f"tp {layout.tp} with {count} key heads"
            yield target.refusal(what, f"--tp {near}", source)


def deepspeed_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job DeepSpeed refuses, beyond `layout_rules`."""
    del site
    decoder = job.decoder
    if layout.ep > 1 and decoder.family not in AUTOEP:
        what = f"ep {layout.ep}: AutoEP has no preset for {decoder.family}"
        yield target.refusal(what, "--ep 1", "module_inject/auto_ep_presets/registry.py")
    if layout.tp == 1:
        return
    if decoder.family not in AUTOTP:
        what = f"tp {layout.tp}: AutoTP does not cut the attention of {decoder.family}"
        yield target.refusal(what, "--tp 1", "module_inject/tp_plan_converter.py")
    elif decoder.num_moe_layers and layout.ep == 1:
        what = f"tp {layout.tp} with ep 1: AutoEP with AutoTP asks for autoep_size above 1"
        yield target.refusal(what, "--ep above 1, or --tp 1", "module_inject/auto_ep_folding.py")
    yield from key_head_rules(layout, target, decoder, "runtime/engine.py")
