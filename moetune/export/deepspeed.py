"""DeepSpeed 0.19.8: the JSON configuration, with AutoEP and AutoTP."""

import json
from collections.abc import Iterator
from types import MappingProxyType

from moetune.export.planned import Export, Planned, refuse

_FILE = "deepspeed_layout.json"
_PRESETS: MappingProxyType[str, str] = MappingProxyType(
    {
        "mixtral": "mixtral",
        "qwen2_moe": "qwen3_moe",
        "qwen3_moe": "qwen3_moe",
        "deepseek_v2": "deepseek_v2",
        "deepseek_v3": "deepseek_v3",
    }
)
"""AutoEP's presets by the model's family."""


def deepspeed_export(planned: Planned) -> Export:
    """Return the configuration; JSON has no comments, so that the notes stand beside it.

    Raises:
        InfeasiblePlanError: AutoEP refuses the layout.
    """
    _check(planned)
    layout = planned.layout
    # The global batch follows from these two and the replicas, which DeepSpeed counts itself.
    document: dict[str, object] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": planned.num_micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
    }
    if planned.decoder.num_moe_layers:
        document["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "preset_model": _PRESETS[planned.decoder.family],
            "use_grouped_mm": True,
        }
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    launch = f"{planned.torchrun} YOUR_SCRIPT.py --deepspeed {_FILE}"
    return Export(
        text=json.dumps(document, indent=2) + "\n", file_name=_FILE, launch=launch,
        not_expressed=tuple(_not_expressed(planned)),
    )  # fmt: skip


def _check(planned: Planned) -> None:
    layout, family = planned.layout, planned.decoder.family
    if planned.decoder.num_moe_layers and family not in _PRESETS:
        raise refuse(
            planned, f"{planned.decoder.name}: AutoEP has no preset for {family}",
            f"use a model of {', '.join(_PRESETS)}, or another --to",
        )  # fmt: skip
    if layout.etp > 1:
        raise refuse(
            planned, f"etp {layout.etp}: AutoEP reserves expert_tensor_parallel_size above 1",
            "plan with --etp 1",
        )  # fmt: skip
    if layout.tp > 1 and layout.ep == 1 and planned.decoder.num_moe_layers:
        raise refuse(
            planned, f"tp {layout.tp} with ep 1: AutoEP with AutoTP asks for autoep_size above 1",
            "plan with --ep above 1, or --tp 1",
        )  # fmt: skip


def _not_expressed(planned: Planned) -> Iterator[str]:
    if "full" in planned.layout.recompute:
        yield "recomputation of full: call model.gradient_checkpointing_enable() in the script"
    if planned.layout.tp > 1:
        yield "sequence parallelism beside tp, which AutoTP does not have"
    if planned.decoder.predictions:
        yield "multi-token prediction, which is the model's own"
    yield f"sequences of {planned.job.length} tokens: the script's data has them"
