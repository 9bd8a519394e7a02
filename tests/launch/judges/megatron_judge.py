"""Megatron-LM's judgement of a script: bash, its own parser, its validation, its configuration.

With the source of Megatron-LM at the version of the jobs (a folder as second argument) arguments go
through `parse_args`, `validate_args` and `core_transformer_config_from_args`. Without it they are
put into megatron-core's own classes, as the parser makes its flags of their fields.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).parent))

from common import judge_all, seem_like, stub_gpus  # type: ignore[import-not-found]

stub_gpus()
SOURCE = sys.argv[2] if len(sys.argv) > 2 else ""
if SOURCE:
    sys.path.insert(0, SOURCE)
DATA = (
    "--lr 1e-4 --min-lr 1e-5 --train-iters 10 --tokenizer-type NullTokenizer --mock-data "
    "--no-persist-layer-norm"
)
ALIASES = {
    "num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma", "norm_epsilon": "layernorm_epsilon",
}  # fmt: skip
SCRIPT_ONLY = (
    "group_query_attention", "position_embedding_type", "max_position_embeddings", "vocab_size",
    "untie_embeddings_and_output_weights", "rotary_base", "rotary_percent", "swiglu",
    "squared_relu", "quick_geglu", "spec", "hybrid_override_pattern", "hybrid_layer_pattern",
    "micro_batch_size", "global_batch_size", "seq_length", "ckpt_format", "grad_reduce_in_bf16",
    "no_gradient_accumulation_fusion", "no_check_for_nan_in_loss_and_grad", "no_rope_fusion",
    "disable_bias_linear",
)  # fmt: skip
"""Arguments of the script that are no fields of megatron-core's classes."""


def arguments_of(text: str) -> list[str]:
    """Return the arguments of a script: its arrays MODEL and LAYOUT, as bash reads them."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words: list[str] = []
    for name in ("MODEL", "LAYOUT"):
        body = text.partition(f"{name}=(")[2].partition("\n)\n")[0]
        words += shlex.split(body)
    return words


def environment_of(text: str) -> dict[str, str]:
    """Return what the script exports."""
    lines = (line[7:].partition("=") for line in text.splitlines() if line.startswith("export "))
    return {name: value for name, _, value in lines}


def check(job: dict[str, Any]) -> None:
    """Raise what the runtime raises."""
    seem_like(job["chip"])
    given, layout = arguments_of(job["text"]), job["plan"]["layout"]
    os.environ.update(environment_of(job["text"]))
    os.environ.update(WORLD_SIZE=str(job["plan"]["inputs"]["world_size"]), RANK="0", LOCAL_RANK="0")
    config = parsed(given) if SOURCE else built(given)
    assert config.tensor_model_parallel_size == layout["tp"]
    assert config.expert_tensor_parallel_size == layout["etp"]
    assert (config.virtual_pipeline_model_parallel_size or 1) == layout["vpp"]
    heads(config)


def heads(config: Any) -> None:
    """Raise where Mamba's mixer or a hybrid's stack, which are built on GPUs, would."""
    if not getattr(config, "is_hybrid_model", False):
        return
    tp, cp, pp = (
        config.tensor_model_parallel_size, config.context_parallel_size,
        config.pipeline_model_parallel_size,
    )  # fmt: skip
    assert config.virtual_pipeline_model_parallel_size is None, "virtual stages of a hybrid"
    assert config.mamba_num_heads % tp == 0, "nheads must be evenly divisble by tp_size"
    groups = config.mamba_num_groups
    assert groups % tp == 0, "ngroups must be evenly divisible by tp_size"
    assert config.mamba_num_heads // tp % cp == 0, "nheads by tp_size * cp_size"
    assert groups // tp % cp == 0 or cp % (groups // tp) == 0, "ngroups by tp_size * cp_size"
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    middle = pp - sum(num is not None for num in ends)
    left = config.num_layers - sum(num or 0 for num in ends)
    assert left % middle == 0 if middle else left == 0, "layers of a hybrid's stages"


def parsed(given: list[str]) -> Any:
    """Return the configuration that the training script makes of its arguments."""
    from megatron.training import arguments

    sys.argv = ["pretrain.py", *given, *DATA.split()]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    args = arguments.parse_args()
    arguments.validate_args(args)
    if getattr(args, "vocab_size", None) is not None:
        args.padded_vocab_size = args.vocab_size
    return arguments.core_transformer_config_from_args(args)


def built(given: list[str]) -> Any:
    """Return a configuration of megatron-core's classes with the arguments as their fields."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = flags(given)
    is_latent = "multi_latent_attention" in values
    model = MLATransformerConfig if is_latent else TransformerConfig
    known = {item.name for item in fields(model)}
    others = {item.name for cls in (DistributedDataParallelConfig, OptimizerConfig)
              for item in fields(cls)}  # fmt: skip
    unknown = [name for name in values if name not in known | others | {*SCRIPT_ONLY}]
    assert not unknown, f"unknown arguments: {unknown}"
    kept = {name: cast(value, get_type_hints(model)[name]) for name, value in values.items()
            if name in known}  # fmt: skip
    if "swiglu" in values:
        kept |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if "no_rope_fusion" in values:
        kept["apply_rope_fusion"] = False
    stages = str(kept.get("pipeline_model_parallel_layout", "")).count("|") + 1
    virtual = stages // kept["pipeline_model_parallel_size"]
    if virtual > 1:
        kept["virtual_pipeline_model_parallel_size"] = virtual
    if "cpu_offloading_num_layers" in kept:
        kept["cpu_offloading"] = True
    return model(
        **kept, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        add_bias_linear="disable_bias_linear" not in values,
    )  # fmt: skip


def flags(given: list[str]) -> dict[str, list[str]]:
    """Return the words behind each flag, by the name of its field."""
    words: dict[str, list[str]] = {}
    name = ""
    for word in given:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            name = ALIASES.get(name, name)
            words[name] = []
        else:
            words[name].append(word)
    return words


def cast(words: list[str], hint: Any) -> Any:
    """Return the value of a field of this type."""
    if not words:
        return True
    if "List" in str(hint) or "list" in str(hint) or "Tuple" in str(hint):
        text = words[0]
        if text.startswith("["):
            return [int(size) for size in text[1:-1].split(",")]
        return words if len(words) > 1 or not text.count("|") else text
    for kind in (int, float):
        if kind in (hint, *get_args(hint)):
            return kind(words[0])
    return words[0]


if __name__ == "__main__":
    judge_all(check)
