"""Megatron-Bridge's judgement of a program: its recipe, the layout, and its own validation.

The Hugging Face Hub is not asked: `AutoBridge.from_hf_pretrained` takes the configuration of the
job, whose fields are sizes. Sources of a version (Bridge's and Megatron-Core's) come as a second
argument, as of `PYTHONPATH`; without it the installed packages are asked.
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path[0] = str(Path(__file__).parent)

from common import (  # type: ignore[import-not-found] # noqa: E402
    judge_all,
    seem_like,
    stub_gpus,
)

sys.path.pop(0)
stub_gpus()
if len(sys.argv) > 2:
    sys.path[:0] = sys.argv[2].split(os.pathsep)


ARCHITECTURES = {
    "kimi_k2": "DeepseekV3ForCausalLM", "nemotron_h": "NemotronHForCausalLM",
    "step3p5": "Step3p5ForCausalLM", "step3p7": "Step3p7ForConditionalGeneration",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM", "bailing_moe_v2": "BailingMoeV2ForCausalLM",
}  # fmt: skip
"""Classes of types that come with the model, as the Hub has them."""
ADDED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"rope_scaling": {"type": "yarn", "factor": 16}},
    "mimo_v2_flash": {"attention_value_scale": 0.707},
}
"""Fields of no size that the Hub's configurations have beside those of the job."""
TYPES = {"bailing_moe": "bailing_moe_v2"}
"""Types of Bridge's own configuration classes for what the Hub has under another type."""


def check(job: dict[str, Any]) -> None:
    """Raise what the runtime raises."""
    seem_like(job["chip"])
    layout, inputs = job["plan"]["layout"], job["plan"]["inputs"]
    words = job["launch"].split()
    os.environ.update(word.split("=", 1) for word in words if word.startswith("CUDA_DEVICE"))
    os.environ.update(WORLD_SIZE=str(inputs["world_size"]), RANK="0", LOCAL_RANK="0")
    from_configuration(job["config"])
    module = ModuleType("exported")
    exec(compile(job["text"], job["file_name"], "exec"), module.__dict__)  # noqa: S102
    cfg = module.configuration()
    from megatron.bridge.training.config import runtime_config_update

    runtime_config_update(cfg)
    cfg.validate()
    assert cfg.data_parallel_size == layout["dp"]
    assert cfg.model.num_layers, "no layers"
    assert cfg.train.global_batch_size == inputs["global_batch"]


def from_configuration(config: dict[str, Any]) -> None:
    """Let bridges read a configuration instead of the Hub's, whole or its language model's."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    def whole(*_: object, **__: object) -> Any:
        native = made(config)
        native.architectures = [architecture_of(native.model_type)]
        return AutoBridge.from_hf_config(native)

    def of_text(*_: object, **__: object) -> Any:
        shared = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        return SimpleNamespace(text_config=made({**shared, **config["text_config"]}))

    AutoBridge.from_hf_pretrained = whole
    AutoConfig.from_pretrained = of_text


def made(config: dict[str, Any]) -> Any:
    """Return a configuration of transformers' class, or of one that comes with the model."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {**ADDED.get(config["model_type"], {}), **config}
    kind = fields.pop("model_type")
    kind = TYPES.get(kind, kind)
    if kind in CONFIG_MAPPING and "hybrid_override_pattern" not in config:  # whose class is Hub's
        return AutoConfig.for_model(kind, **fields)
    members = {"model_type": kind, "max_position_embeddings": 131072}
    native = type("Config", (PretrainedConfig,), members)(**fields)
    native.auto_map = {"AutoModelForCausalLM": f"modeling.{architecture_of(kind)}"}
    return native


def architecture_of(kind: str) -> str | None:
    """Return the class of a type of models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ARCHITECTURES.get(kind))
    return name


if __name__ == "__main__":
    judge_all(check)
