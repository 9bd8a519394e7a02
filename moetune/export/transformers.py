"""transformers: a program with a `DistributedConfig`, the model and the trainer's arguments."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from moetune.domain.training import TokenDispatcher
from moetune.export.keys import Setting, size, write_keys
from moetune.export.peft import (
    DATA,
    FROZEN_NAMES,
    MAIN,
    model_words,
    optimizer_line,
    optimizer_remarks,
    peft_export,
    trainer_launch,
)
from moetune.export.planned import Export, Planned, remarks

_IN_FOUR_BITS = frozenset({"gpt_oss"})
"""Families whose published weights are MXFP4; only a dequantized copy of them can be trained."""
FIXED_EXPERT_KERNELS = frozenset({"dbrx", "llama4_text", "longcat_flash"})
"""Families whose expert modules lack `use_experts_implementation`
(`transformers/integrations/moe.py`): naming a kernel for them is an error, and they call none."""
_DIVIDES_BY_GROUPS = frozenset({"beam", "deepseek_v3", "dots1"})
"""Families whose configuration may leave `n_group` null although their router divides by it
(`transformers/models/dots1/modeling_dots1.py`, Dots1TopkRouter)."""


def load_imports(planned: Planned) -> str:
    """Return the imports from transformers that `load_arguments` needs; "" if none."""
    return "Mxfp4Config, " if planned.decoder.family in _IN_FOUR_BITS else ""


def load_arguments(planned: Planned) -> str:
    """Return the lines of `from_pretrained`'s arguments that the model's class needs."""
    return "".join(f"        {line}\n" for line in _arguments(planned))


def _arguments(planned: Planned) -> Iterator[str]:
    family, config = planned.decoder.family, planned.config
    if planned.decoder.num_moe_layers and family not in FIXED_EXPERT_KERNELS:
        yield 'experts_implementation="grouped_mm",'
    if planned.job.packing is not None:  # its kernels stop at the ends of documents
        yield 'attn_implementation="flash_attention_2",'
    if family in _IN_FOUR_BITS:
        yield "quantization_config=Mxfp4Config(dequantize=True),"
    if family in _DIVIDES_BY_GROUPS and config.get("n_group", 1) is None:
        yield "# The router divides by n_group, which is null: one group of all experts is none."
        yield "n_group=1,"
        yield "topk_group=1,"


_FILE = "transformers_layout.py"
_IMPLEMENTATIONS: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
    {"all_to_all": "all_to_all", "all_gather": "all_reduce"}
)
DISTRIBUTED = (
    size("tp", "tp_size"),
    size("dp", "fsdp_size", None),
    size("ep", "ep_size"),
    Setting(
        name="dispatcher", keys={"ep_implementation": "all_to_all"},
        write=lambda planned: (_implementation(planned),),
        read=lambda name: "all_gather" if name == "all_reduce" else "all_to_all",
    ),
)  # fmt: skip
"""Settings of `DistributedConfig`."""


def _implementation(planned: Planned) -> str:
    layout = planned.layout
    return _IMPLEMENTATIONS[layout.dispatcher] if layout.ep > 1 else "auto"


_FREE, _KEEP = "free_full_weight", "keep_full_weight"
SHARDED: MappingProxyType[str, Mapping[str, str]] = MappingProxyType({
    "dbrx": {
        "transformer.wte": _FREE, "transformer.blocks.*": _FREE, "transformer.norm_f": _KEEP,
    },
    "gpt2": {"transformer.wte": _FREE, "transformer.h.*": _FREE, "transformer.ln_f": _KEEP},
    "jamba": {"model.final_layernorm": _KEEP},
    "llama4_text": {
        "model.embed_tokens": _FREE, "model.layers.*": _FREE, "model.norm": _KEEP,
    },
    "nemotron_h": {"model.embeddings": _FREE, "model.norm_f": _KEEP},
})  # fmt: skip
"""Modules to shard of families whose names `base_model_fsdp_plan` (`configuration_utils.py`) lacks.
Without this FSDP gathers those parts, or all blocks, for the whole step."""


_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")


def transformers_export(planned: Planned) -> Export:
    """Return a program with `LAYOUT`, `load_model` and `training_arguments`."""
    if planned.job.tuning.adapters is not None:
        return peft_export(planned, load_arguments(planned))
    layout, missing = planned.layout, tuple(_not_expressed(planned))
    text = (_TEXT + MAIN).format(
        remarks=remarks(
            planned, missing, planned.where_to_start, DATA, *optimizer_remarks(planned)
        ),
        imports=load_imports(planned),
        standard="import re\n" if planned.job.tuning.frozen else "",
        arguments=load_arguments(planned),
        sharded=_fsdp_plan_argument(planned),
        made="model =" if planned.job.tuning.frozen else "return",
        frozen=_freeze_lines(planned),
        model=model_words(planned),
        layout=layout,
        keys=write_keys(DISTRIBUTED, planned),
        num_micro_batches=planned.num_micro_batches,
        is_recomputed="full" in layout.recompute,
        is_cast=layout.dp == 1,  # with replicas FSDP casts
        optimizer=optimizer_line(planned),
    )
    launch = trainer_launch(planned, _FILE)
    return Export(text=text, file_name=_FILE, launch=launch, not_expressed=missing)


def _freeze_lines(planned: Planned) -> str:
    """Return the lines that freeze parts of the model; "" if it trains all."""
    if not planned.job.tuning.frozen:
        return ""
    names = "|".join(map(FROZEN_NAMES.__getitem__, planned.job.tuning.frozen))
    return f"""
    for name, parameter in model.named_parameters():
        if re.search(r"{names}", name):
            parameter.requires_grad_(False)
    return model"""


def _fsdp_plan_argument(planned: Planned) -> str:
    """Return the argument `fsdp_plan` for families in `SHARDED` with replicas; else ""."""
    rules = SHARDED.get(planned.decoder.family)
    if rules is None or planned.layout.dp == 1:
        return ""
    lines = "".join(f'        "{name}": "{style}",\n' for name, style in rules.items())
    return f"    fsdp_plan={{\n{lines}    }},\n"


def _not_expressed(planned: Planned) -> Iterator[str]:
    if planned.layout.tp > 1:
        yield "sequence parallelism with tp, which transformers reserves and does not run yet"
    if planned.decoder.num_moe_layers and planned.decoder.family in FIXED_EXPERT_KERNELS:
        yield f"the kernel grouped_mm, which the experts of {planned.decoder.family} do not call"
    if planned.decoder.predictions:
        yield "multi-token prediction, which transformers does not train"
    yield f"sequences of {planned.job.length} tokens: the data's collator makes them"
