"""Megatron-Bridge's judgement of a program: its recipe, the layout, and its own validation.

The Hugging Face Hub is not asked: `AutoBridge.from_hf_pretrained` takes the configuration of the
job, whose fields are sizes. Sources of a version (Bridge's and Megatron-Core's) come as a second
argument, as of `PYTHONPATH`; without it the installed packages are asked.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
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


ARCHITECTURES = {"kimi_k2": "DeepseekV3ForCausalLM", "nemotron_h": "NemotronHForCausalLM"}
"""Classes of types that transformers does not have."""


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
    """Let bridges read a configuration instead of the Hub's."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def made(*_: object, **__: object) -> Any:
        fields = dict(config)
        kind = fields.pop("model_type")
        if kind in CONFIG_MAPPING_NAMES:
            found = AutoConfig.for_model(kind, **fields)
        else:  # whose class comes with the model
            found = type("Config", (PretrainedConfig,), {"model_type": kind})(**fields)
            found.auto_map = {"AutoModelForCausalLM": f"modeling.{ARCHITECTURES.get(kind)}"}
        found.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ARCHITECTURES.get(kind))]
        return AutoBridge.from_hf_config(found)

    AutoBridge.from_hf_pretrained = made


if __name__ == "__main__":
    judge_all(check)
