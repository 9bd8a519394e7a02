"""transformers with PEFT: a program that trains adapters with Trainer.

Replicas use torch's DDP, or FSDP2 by the trainer's options. Experts of a 4-bit base are quantized
after loading, because bitsandbytes quantizes only linear layers itself (`nn/parametrize.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from moetune.domain.attention import LatentAttention
from moetune.domain.tuning import ModelPart
from moetune.export.planned import Export, Planned, remarks

_FILE = "peft_layout.py"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FROZEN_NAMES: Mapping[ModelPart, str] = MappingProxyType({
    "embedding": r"embed_tokens|wte|embeddings",
    "attention": r"self_attn\.|linear_attn\.|mixer\.(?!experts|gate|shared)|mamba\.",
    "dense": r"(mlp|feed_forward)\.(gate|up|down|gate_up)_proj", "router": r"\.(gate|router)\.",
    "experts": r"\.experts\.", "shared_experts": r"shared_expert",
    "norms": r"layernorm\.|model\.norm\.|\.norm\.weight$", "head": r"lm_head",
})  # fmt: skip
"""Patterns of parameter names by model part."""
_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
MAIN = Path(__file__).with_name("trainer_main.txt").read_text(encoding="utf-8")
"""The end of a program with Trainer."""
DATA = (
    "DATA is a folder that datasets.load_from_disk reads: rows of input_ids and labels, one for "
    "each sequence. Give the optimizer's rates to training_arguments."
)
_INPUTS = "    model.enable_input_require_grads()  # of blocks that are computed again\n"
_QUANTIZED = """\
    for module in model.modules():
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weights = getattr(module, name, None)
            if isinstance(weights, torch.nn.Parameter) and weights.dim() == 3:
                replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
"""
_FOUR_BITS = """\
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        device_map={"": int(os.environ.get("LOCAL_RANK", 0))},
"""


def peft_export(planned: Planned, arguments: str) -> Export:
    """Return a program with `ADAPTERS`, `load_model` and `training_arguments`.

    Args:
        arguments: lines of `from_pretrained` that the model's class needs.
    """
    adapters = planned.job.tuning.adapters
    assert adapters is not None  # noqa: S101 - of plans that train adapters
    is_narrow, layout = planned.job.tuning.base != "bfloat16", planned.layout
    missing = (f"sequences of {planned.job.length} tokens: the data's collator makes them",)
    modules = [*modules_of(planned)]
    parameters = [*parameters_of(planned)] if adapters.targets != "attention" else []
    text = (_TEXT + MAIN).format(
        remarks=remarks(planned, missing, planned.where_to_start, DATA, *_loading_remarks(planned)),
        imports=_imports(is_narrow=is_narrow), rank=adapters.rank, alpha=2 * adapters.rank,
        model=model_words(planned),
        modules='"all-linear"' if modules == ["all-linear"] else modules,
        parameters=parameters or None,
        arguments=arguments + (_FOUR_BITS if is_narrow else ""),
        quantized=_QUANTIZED if is_narrow and planned.decoder.num_moe_layers else "",
        grads=_INPUTS if "full" in layout.recompute else "",
        layout=layout, num_micro_batches=planned.num_micro_batches,
        is_recomputed="full" in layout.recompute,
        sharded=optimizer_line(planned) + (
            '        fsdp=True,\n        fsdp_config={"version": 2},\n' if layout.zero else
            "        ddp_find_unused_parameters=False,\n"
        ),
    )  # fmt: skip
    launch = trainer_launch(planned, _FILE)
    return Export(text=text, file_name=_FILE, launch=launch, not_expressed=missing)


def optimizer_line(planned: Planned) -> str:
    """Return the line of Trainer's optimizer; "" for its default.

    8-bit AdamW is bitsandbytes' for replicas, and torchao's for shards, which are DTensors.
    """
    if planned.job.optimizer == "adam":
        return ""
    name = "adamw_torch_8bit" if planned.layout.zero else "adamw_bnb_8bit"
    return f'        optim="{name}",\n'


def model_words(planned: Planned) -> str:
    """Return the Python expression of the model's name or folder."""
    if planned.hub_name:
        return f'os.environ.get("MODEL", "{planned.hub_name}")'
    return 'os.environ["MODEL"]  # the folder of its config.json and weights'


def trainer_launch(planned: Planned, file_name: str) -> str:
    """Return the command that starts a program, and asks for its data and its model's folder."""
    needed = {"DATA": "a folder of sequences"}
    if not planned.hub_name:
        needed["MODEL"] = "the folder of config.json and weights"
    words = (f'{name}="${{{name}:?set it to {what}}}"' for name, what in needed.items())
    return planned.asks_in_line + " ".join([*words, planned.torchrun, file_name])


def _imports(*, is_narrow: bool) -> str:
    quantized = "from bitsandbytes.nn.parametrize import replace_parameter_4bit\n"
    config = "BitsAndBytesConfig, " if is_narrow else ""
    return (
        f"{quantized if is_narrow else ''}from peft import LoraConfig, get_peft_model\n"
        f"from transformers import AutoModelForCausalLM, {config}Trainer, TrainingArguments\n"
    )


def modules_of(planned: Planned) -> Iterator[str]:
    """Yield the names of the linear modules that get adapters."""
    adapters, decoder = planned.job.tuning.adapters, planned.decoder
    if adapters is None or adapters.targets == "experts":
        return
    if adapters.targets == "all" and not decoder.num_moe_layers:
        yield "all-linear"
        return
    latent = [mixer for mixer in decoder.mixers if isinstance(mixer, LatentAttention)]
    if not latent:
        yield from _ATTENTION
    elif latent[0].q_rank:
        yield from _LATENT
    else:
        yield from ("q_proj", *_LATENT[2:])


def parameters_of(planned: Planned) -> Iterator[str]:
    """Yield the parameter names of the routed experts' fused matrices."""
    part = next((part for part in planned.decoder.routed_kinds if part is not None), None)
    if part is not None:
        yield f"experts.{'gate_up_proj' if part.is_gated else 'up_proj'}"
        yield "experts.down_proj"


def optimizer_remarks(planned: Planned) -> Iterator[str]:
    """Yield the package that the optimizer needs."""
    if planned.job.optimizer != "adam":
        yield f"Its optimizer needs {'torchao' if planned.layout.zero else 'bitsandbytes'}."


def _loading_remarks(planned: Planned) -> Iterator[str]:
    yield from optimizer_remarks(planned)
    if planned.job.tuning.base != "bfloat16" and planned.decoder.num_moe_layers:
        yield (
            "Experts are loaded in bfloat16 and then quantized (bitsandbytes 0.48 or newer): until "
            "then the model needs its memory in 16 bits."
        )
