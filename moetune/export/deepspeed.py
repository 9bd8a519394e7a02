"""DeepSpeed 0.19.8: the JSON configuration, with AutoEP and AutoTP."""

import json
from collections.abc import Iterator

from moetune.domain.deepspeed_rules import PRESETS
from moetune.export.planned import Export, Planned

_FILE = "deepspeed_layout.json"
_NEWEST_TRANSFORMERS = "5.22.2"
_OLDER_TRANSFORMERS = frozenset({"mixtral", "qwen3_moe", "qwen3_5_moe", "minimax_m3"})
"""Presets that record router logits by a registry that transformers 5.23 changed
(`_CAN_RECORD_REGISTRY.get` in `module_inject/auto_ep_presets/base.py`)."""
_CUTS = (
    {"patterns": [r".*\.self_attn\.[qkv]_proj\.(weight|bias)$"], "partition_type": "column"},
    {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
    {
        "patterns": [r".*\.self_attn\.[qk]_norm\.weight$"], "partition_type": "skip",
        "grad_allreduce": True,
    },
    {
        "patterns": [r".*\.(mlp|shared_expert)\.(gate|up)_proj\.weight$"],
        "partition_type": "column",
    },
    {"patterns": [r".*\.(mlp|shared_expert)\.down_proj\.weight$"], "partition_type": "row"},
)  # fmt: skip
"""Of attention and dense FFNs. The tensor plan of transformers, which AutoTP takes otherwise, cuts
experts in ways that `module_inject/tp_plan_converter.py` refuses."""


def deepspeed_export(planned: Planned) -> Export:
    """Return the configuration; JSON has no comments, so that the head is a key of its own."""
    layout = planned.layout
    # The global batch follows from these two and the replicas, which DeepSpeed counts itself.
    document: dict[str, object] = {
        "_plan": [*planned.head, planned.where_to_start],
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": planned.num_micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
    }
    if layout.ep > 1:
        document["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.ep,
            "expert_tensor_parallel_size": 1,
            "preset_model": PRESETS[planned.decoder.family],
            "use_grouped_mm": True,
        }
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
        if planned.decoder.num_moe_layers:
            cuts = {"use_default_specs": False, "layer_specs": list(_CUTS)}
            document["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": cuts}
    launch = f"{planned.asks_in_line}{planned.torchrun} YOUR_SCRIPT.py --deepspeed {_FILE}"
    return Export(
        text=json.dumps(document, indent=2) + "\n", file_name=_FILE, launch=launch,
        not_expressed=tuple(_not_expressed(planned)),
    )  # fmt: skip


def _not_expressed(planned: Planned) -> Iterator[str]:
    layout, family = planned.layout, planned.decoder.family
    if layout.ep > 1 and PRESETS[family] in _OLDER_TRANSFORMERS:
        yield (
            f"transformers {_NEWEST_TRANSFORMERS} or older: AutoEP's preset {PRESETS[family]} "
            "fails with newer ones"
        )
    if "full" in layout.recompute:
        yield "recomputation of full: call model.gradient_checkpointing_enable() in the script"
    if layout.tp > 1:
        yield "sequence parallelism beside tp, which AutoTP does not have"
        if planned.decoder.num_moe_layers:
            yield "vocabularies in parts, which AutoTP leaves whole"
    if planned.decoder.predictions:
        yield "multi-token prediction, which is the model's own"
    yield f"sequences of {planned.job.length} tokens: the script's data has them"
