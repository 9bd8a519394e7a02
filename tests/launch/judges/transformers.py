"""transformers' own distribution of a small model of the family, and one step of it.

The program that `export` wrote is loaded, its `DistributedConfig` and `TrainingArguments` are made,
and a model with two layers, and the real numbers of heads and experts, is distributed by it over a
fake process group of all ranks; rank 0 runs a forward and a backward pass and AdamW.
"""

import os
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKPOINTS = tempfile.TemporaryDirectory()
SMALL = {
    "vocab_size": 1024, "intermediate_size": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_head_dim": 16, "ssm_state_size": 16, "index_head_dim": 16, "index_topk": 8,
    "intermediate_size_mlp": 64, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "sliding_window": 16,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "global_head_dim": 16, "n_embd": 64,
}  # fmt: skip
"""Sizes of the small model; heads, experts and groups stay as they are."""


def prepare() -> None:
    """Let exchanges of a fake process group return what they were given."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from transformers.distributed import expert_parallel

    def same_sizes(received: torch.Tensor, sent: torch.Tensor, **_: object) -> None:
        received.copy_(sent)

    expert_parallel.all_to_all_single = same_sizes


def judge(question: dict[str, Any]) -> str | None:
    """Return what transformers refuses, None where a step of the small model runs."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(MODEL="/nowhere", DATA="/nowhere", WORLD_SIZE=str(question["world_size"]),
                      RANK="0", LOCAL_RANK="0")  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=question["world_size"], store=FakeStore())
    try:
        step(module_of(question["text"]), question)
    except Exception as error:  # noqa: BLE001 - of any kind: it is what the user would see
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return None


def module_of(text: str) -> ModuleType:
    """Return the exported program as a module."""
    module = ModuleType("exported")
    exec(compile(text, "transformers_layout.py", "exec"), module.__dict__)  # noqa: S102
    return module


def small_config(config: dict[str, Any]) -> Any:
    """Return a configuration of a few layers of the family, with its own heads and experts."""
    from transformers import AutoConfig

    plain = {**config, **(config.get("text_config") or {})}
    plain = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    [counts] = [key for key in ("num_hidden_layers", "num_layers", "n_layer") if key in plain]
    kept = kept_layers(plain, plain[counts])
    for key, value in plain.items():
        if isinstance(value, (list, str)) and len(value) == plain[counts]:
            picked = [value[layer] for layer in kept]
            plain[key] = "".join(picked) if isinstance(value, str) else picked
        elif key in SMALL and isinstance(value, int):
            plain[key] = SMALL[key]
    plain[counts] = len(kept)
    heads = plain.get("num_attention_heads") or plain["n_head"]
    for key in ("hidden_size", "n_embd"):
        if key in plain:
            plain[key] = 64 if "head_dim" in plain else 16 * heads
    for key in ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id"):
        plain.pop(key, None)
    return AutoConfig.for_model(plain.pop("model_type"), **plain)


def kept_layers(plain: dict[str, Any], layers: int) -> list[int]:
    """Return the ends of the model, and a layer of each kind that any list of them names."""
    kept = {0, 1, layers // 2, layers - 1}
    for value in plain.values():
        if isinstance(value, (list, str)) and len(value) == layers:
            kept |= {value.index(kind) for kind in dict.fromkeys(value)}
    return sorted(layer for layer in kept if layer < layers)


def checkpoint(question: dict[str, Any]) -> str:
    """Return the folder of a small model of the family, made once for each model."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(CHECKPOINTS.name, question["question"]["model"])
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(question["config"]))
        model.save_pretrained(folder)
    return str(folder)


def step(module: Any, question: dict[str, Any]) -> None:
    """Make the arguments, distribute the model and run one step of it."""
    import torch
    from torch.distributed.tensor import DTensor

    layout = question["layout"]
    with tempfile.TemporaryDirectory() as folder:
        given = module.training_arguments(folder)
    sequences = given.per_device_train_batch_size * given.gradient_accumulation_steps
    assert sequences * layout["dp"] == question["global_batch"]
    module.MODEL = checkpoint(question)
    model = module.load_model()
    if given.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 1000, (1, 32))
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    if layout["dp"] * layout["tp"] > 1:
        assert any(isinstance(value, DTensor) for value in model.parameters())
