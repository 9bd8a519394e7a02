"""Rules of DeepSpeed, which trains models of transformers: what of a layout it refuses at start.

Read in DeepSpeed 0.19.8; files are those below `deepspeed/`.
"""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.layout import BrokenRule
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.transformers_rules import key_head_rules

PRESETS: MappingProxyType[str, str] = MappingProxyType({
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "minimax_m3_vl_text": "minimax_m3",
})  # fmt: skip
"""AutoEP's presets by the model's family (`module_inject/auto_ep_presets/`)."""
CUTS_ATTENTION = frozenset(
    {"llama", "mistral", "nemotron", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"}
)
"""Families whose heads AutoTP cuts; it has no gradient of rotary keys that latent attention shares,
and none of delta nets (`module_inject/tp_plan_converter.py`)."""


def deepspeed_rules(
    layout: FoldedLayout, target: Target, job: TrainingJob, site: Site | None
) -> Iterator[BrokenRule]:
    """Yield what of a layout of a job DeepSpeed refuses, beyond `layout_rules`."""
    del site
    decoder = job.decoder
    if layout.ep > 1 and decoder.family not in PRESETS:
        what = f"ep {layout.ep}: AutoEP has no preset for {decoder.family}"
        yield target.refusal(what, "--ep 1", "module_inject/auto_ep_presets/registry.py")
    if layout.tp == 1:
        return
    if decoder.family not in CUTS_ATTENTION:
        what = f"tp {layout.tp}: AutoTP does not cut the attention of {decoder.family}"
        yield target.refusal(what, "--tp 1", "module_inject/tp_plan_converter.py")
    elif decoder.num_moe_layers and layout.ep == 1:
        what = f"tp {layout.tp} with ep 1: AutoEP with AutoTP asks for autoep_size above 1"
        yield target.refusal(what, "--ep above 1, or --tp 1", "module_inject/auto_ep_folding.py")
    yield from key_head_rules(layout, target, decoder, "runtime/engine.py")
