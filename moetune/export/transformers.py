"""transformers 5.23.0: a `DistributedConfig`, the arguments of the model and of the trainer."""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.training import TokenDispatcher
from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "transformers_layout.py"
_IMPLEMENTATIONS: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
    {"all_to_all": "all_to_all", "all_gather": "all_reduce"}
)


_TEXT = """\
{remarks}import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

LAYOUT = DistributedConfig(
    tp_size={layout.tp},
    fsdp_size={layout.dp},
    dp_replicate_size=1,
    pp_size=1,
    ep_size={layout.ep},
    ep_implementation="{implementation}",
    fsdp_mixed_precision=True,
)


def load_model() -> torch.nn.Module:
    \"\"\"Return the model in the planned layout: float32, its GEMMs in bfloat16.\"\"\"
    return AutoModelForCausalLM.from_pretrained(
        "{name}",
        distributed_config=LAYOUT,
        experts_implementation="grouped_mm",
        dtype=torch.float32,
    )


def training_arguments(output_dir: str) -> TrainingArguments:
    \"\"\"Return the planned batch; add the optimizer and its schedule.\"\"\"
    return TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size={layout.micro_batch},
        gradient_accumulation_steps={num_micro_batches},
        gradient_checkpointing={is_recomputed},
    )
"""


def transformers_export(planned: Planned) -> Export:
    """Return a module with `LAYOUT`, `load_model` and `training_arguments`.

    Raises:
        InfeasiblePlanError: tensor parallelism would cut the experts, which the plan does not.
    """
    layout, missing = planned.layout, tuple(_not_expressed(planned))
    if layout.tp > 1 and layout.ep == 1 and planned.decoder.num_moe_layers:
        raise refuse(
            planned, f"tp {layout.tp} with ep 1: its tensor plan cuts the experts, too",
            f"plan with --ep {layout.tp}, or --tp 1",
        )  # fmt: skip
    text = _TEXT.format(
        remarks=remarks(planned, missing, "Import it under torchrun."),
        layout=layout,
        implementation=_IMPLEMENTATIONS[layout.dispatcher] if layout.ep > 1 else "auto",
        name=planned.hub_name or "PATH_OF_THE_MODEL",
        num_micro_batches=planned.num_micro_batches,
        is_recomputed="full" in layout.recompute,
    )
    return Export(
        text=text, file_name=_FILE, launch=f"{planned.torchrun} YOUR_SCRIPT.py",
        not_expressed=missing,
    )  # fmt: skip


def _not_expressed(planned: Planned) -> Iterator[str]:
    if planned.layout.tp > 1:
        yield "sequence parallelism beside tp, which transformers reserves and does not run yet"
    if planned.decoder.predictions:
        yield "multi-token prediction, which transformers does not train"
    yield f"sequences of {planned.job.length} tokens: the data's collator makes them"
