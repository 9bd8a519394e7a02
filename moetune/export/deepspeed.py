"""DeepSpeed 0.19.8: a program with the model and a configuration that covers AutoEP and AutoTP."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from moetune.domain.torch_rules import AUTOEP
from moetune.export.keys import Setting, Value, size, write_keys
from moetune.export.planned import Export, Planned, remarks
from moetune.export.transformers import load_arguments, load_imports

_FILE = "deepspeed_layout.py"
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
"""Tensor-parallel cuts of attention and dense FFNs. Without them AutoTP takes the tensor plan of
transformers, whose cuts of experts `module_inject/tp_plan_converter.py` refuses."""
_SHARDS_WEIGHTS = 3
"""ZeRO stage that shards parameters, too."""
_RATE = 5e-5
"""Default of transformers' Trainer (`TrainingArguments.learning_rate`)."""
_DATA = (
    "DATA is a folder that datasets.load_from_disk reads: rows of input_ids and labels, one for "
    "each sequence. The optimizer's rate is that of transformers' Trainer; give yours in CONFIG."
)
_HOSTS = (
    "Start it on one node, from which ssh reaches {nodes}; each line of HOSTFILE is the name "
    "of a node with its GPUs: node-1 slots={width}. Or start it by torchrun on every node."
)
_ADAMW: dict[str, object] = {"optimizer": {"type": "AdamW", "params": {"lr": _RATE}}}
_UNTESTED: dict[str, object] = {"zero_allow_untested_optimizer": True}
"""Key that lets ZeRO shard an optimizer of another package (`runtime/engine.py`)."""
_OPTIMIZER = f"        optimizer=AdamW8bit(model.parameters(), lr={_RATE}),\n"
_OPTIMIZER_IMPORT = "from bitsandbytes.optim import AdamW8bit\n"
_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_SHARD_IMPORT = "from transformers.integrations import HfDeepSpeedConfig\n"
_SHARD = """\
    # from_pretrained shards by it as long as it lives, and converts no weights with AutoTP
    whole = {key: value for key, value in CONFIG.items() if key != "tensor_parallel"}
    config = HfDeepSpeedConfig(whole)  # noqa: F841
"""


CONFIG = (
    size("micro_batch", "train_micro_batch_size_per_gpu", None),
    Setting(
        name="accumulated", keys={"gradient_accumulation_steps": 1}, read=lambda steps: steps,
        write=lambda planned: (planned.num_micro_batches,),
    ),
    size("zero", "zero_optimization.stage", 0),
    Setting(
        name="hides_gradients", keys={"zero_optimization.overlap_comm": None},
        write=lambda _: (True,), read=lambda overlaps: overlaps is not False,
    ),
    Setting(
        name="ep", keys={"expert_parallel.enabled": False, "expert_parallel.autoep_size": 1},
        write=lambda planned: (planned.layout.ep > 1, planned.layout.ep),
        read=lambda is_on, size: size if is_on else 1,
    ),
    Setting(
        name="tp", keys={"tensor_parallel.autotp_size": 1}, read=lambda size: size,
        write=lambda planned: (planned.layout.tp if planned.layout.tp > 1 else None,),
    ),
)  # fmt: skip
"""Settings of DeepSpeed's configuration, by the paths of their keys."""


def deepspeed_export(planned: Planned) -> Export:
    """Return a program with `CONFIG`, `load_model`, `make_engine` and `train`."""
    missing = tuple(_not_expressed(planned))
    name, shards = planned.hub_name, planned.layout.zero == _SHARDS_WEIGHTS
    text = _TEXT.format(
        remarks=remarks(planned, missing, *_notes(planned), _DATA),
        imports=load_imports(planned), arguments=load_arguments(planned),
        shard_import=_SHARD_IMPORT if shards else "", shard=_SHARD if shards else "",
        config=_literal(_config(planned)),
        optimizer=_OPTIMIZER if _is_narrow(planned) else "",
        optimizer_import=_OPTIMIZER_IMPORT if _is_narrow(planned) else "",
        recompute=(
            "    model.gradient_checkpointing_enable()\n"
            if "full" in planned.layout.recompute else ""
        ),
        model=f'default="{name}"' if name else "required=True",
    )  # fmt: skip
    words = f'{_launcher(planned)} {_FILE} --data "${{DATA:?set it to a folder of sequences}}"'
    if name is None:
        words += ' --model "${MODEL:?set it to the folder of config.json and weights}"'
    return Export(text=text, file_name=_FILE, launch=words, not_expressed=missing)


def _config(planned: Planned) -> dict[str, object]:
    """Return DeepSpeed's configuration.

    DeepSpeed derives the global batch from the micro-batch, the accumulation and its replicas.
    """
    layout, keys = planned.layout, write_keys(CONFIG, planned)
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document: dict[str, object] = {
        **{key: keys[key] for key in batch},
        "dataloader_drop_last": True,
        "bf16": {"enabled": True},
        **(_UNTESTED if _is_narrow(planned) else _ADAMW),
        "zero_optimization": _under("zero_optimization", keys),
    }
    if layout.ep > 1:
        document["expert_parallel"] = {
            **_under("expert_parallel", keys),
            "expert_tensor_parallel_size": 1,
            "preset_model": AUTOEP[planned.decoder.family],
            "use_grouped_mm": True,
        }
    if layout.tp > 1:
        document["tensor_parallel"] = _under("tensor_parallel", keys)
        if planned.decoder.num_moe_layers:
            cuts = {"use_default_specs": False, "layer_specs": list(_CUTS)}
            document["tensor_parallel"] = {
                **_under("tensor_parallel", keys), "partition_config": cuts,
            }  # fmt: skip
    return document


def _is_narrow(planned: Planned) -> bool:
    """Return whether the optimizer's moments are in 8 bits."""
    return planned.job.optimizer == "adam-8bit"


def _under(name: str, keys: Mapping[str, Value]) -> dict[str, Value]:
    """Return the keys of a nested object of the configuration."""
    paths = (key.partition(".") for key in keys)
    return {key: keys[f"{first}.{key}"] for first, _, key in paths if first == name}


def _literal(document: dict[str, object]) -> str:
    """Return a JSON document as a Python literal, with True and False."""
    text = json.dumps(document, indent=4)
    return text.replace(": true", ": True").replace(": false", ": False")


def _nodes(planned: Planned) -> tuple[str, str]:
    """Return the numbers of nodes and of GPUs per node as text; "" for both if not known."""
    ranks = planned.job.world_size
    width = min(planned.site.devices_per_node, ranks) if planned.site else ranks + 1
    return ("", "") if ranks % width else (str(ranks // width), str(width))


def _launcher(planned: Planned) -> str:
    """Return DeepSpeed's launcher with the plan's ranks (`deepspeed/launcher/runner.py`)."""
    nodes, width = _nodes(planned)
    if nodes == "1":
        return f"deepspeed --num_gpus {width}"
    hosts = 'deepspeed --hostfile "${HOSTFILE:?set it to the file that lists the nodes}"'
    return f"{hosts} --num_nodes {nodes} --num_gpus {width}" if nodes else hosts


def _notes(planned: Planned) -> Iterator[str]:
    nodes, width = _nodes(planned)
    if nodes == "1":
        yield planned.where_to_start
    else:
        yield _HOSTS.format(nodes=f"all {nodes}" if nodes else "all", width=width or "8")


def _not_expressed(planned: Planned) -> Iterator[str]:
    layout, family = planned.layout, planned.decoder.family
    if layout.ep > 1 and AUTOEP[family] in _OLDER_TRANSFORMERS:
        yield (
            f"transformers {_NEWEST_TRANSFORMERS} or older: AutoEP's preset {AUTOEP[family]} "
            "fails with newer versions"
        )
    if layout.tp > 1:
        yield "sequence parallelism with tp, which AutoTP does not have"
        if planned.decoder.num_moe_layers:
            yield "vocabularies in parts, which AutoTP leaves whole"
    if planned.decoder.predictions:
        yield "multi-token prediction, which the model implements"
    yield f"sequences of {planned.job.length} tokens: the data has them"
