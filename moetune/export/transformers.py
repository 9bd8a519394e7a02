"""transformers 5.23.0: a `DistributedConfig`, the arguments of the model and of the trainer."""

from collections.abc import Iterator
from types import MappingProxyType

from moetune.domain.training import TokenDispatcher
from moetune.export.planned import Export, Planned, refuse, remarks

_FILE = "transformers_layout.py"
_IMPLEMENTATIONS: MappingProxyType[TokenDispatcher, str] = MappingProxyType(
    {"all_to_all": "all_to_all", "all_gather": "all_reduce"}
)


def transformers_export(planned: Planned) -> Export:
    """Return a module with `load_model` and `TRAINING`.

    Raises:
        InfeasiblePlanError: `DistributedConfig` or its dispatch refuses the layout.
    """
    _check(planned)
    layout = planned.layout
    missing = tuple(_not_expressed(planned))
    implementation = _IMPLEMENTATIONS[layout.dispatcher] if layout.ep > 1 else "auto"
    name = planned.hub_name or "PATH_OF_THE_MODEL"
    text = (
        f"{remarks(planned, missing, 'The import and load_model run under torchrun.')}"
        "import torch\n"
        "from transformers import AutoModelForCausalLM, TrainingArguments\n"
        "from transformers.distributed import DistributedConfig\n\n"
        "LAYOUT = DistributedConfig(\n"
        f"    tp_size={layout.tp},\n"
        f"    fsdp_size={layout.dp},\n"
        "    dp_replicate_size=1,\n"
        "    pp_size=1,\n"
        f"    ep_size={layout.ep},\n"
        f'    ep_implementation="{implementation}",\n'
        "    fsdp_mixed_precision=True,\n"
        ")\n\n\n"
        "def load_model() -> torch.nn.Module:\n"
        '    """Return the model in the planned layout, parameters in float32, GEMMs in bfloat16."""\n'
        "    return AutoModelForCausalLM.from_pretrained(\n"
        f'        "{name}",\n'
        "        distributed_config=LAYOUT,\n"
        '        experts_implementation="grouped_mm",\n'
        "        dtype=torch.float32,\n"
        "    )\n\n\n"
        "def training_arguments(output_dir: str) -> TrainingArguments:\n"
        '    """Return the planned batch; add the optimizer and its schedule."""\n'
        "    return TrainingArguments(\n"
        "        output_dir=output_dir,\n"
        f"        per_device_train_batch_size={layout.micro_batch},\n"
        f"        gradient_accumulation_steps={planned.num_micro_batches},\n"
        f"        gradient_checkpointing={'full' in layout.recompute},\n"
        "    )\n"
    )
    return Export(
        text=text, file_name=_FILE, launch=f"{planned.torchrun} YOUR_SCRIPT.py",
        not_expressed=missing,
    )  # fmt: skip


def _check(planned: Planned) -> None:
    """Refuse what `DistributedConfig` and `EPImplementation` refuse, before it is launched."""
    layout = planned.layout
    if layout.ep % layout.tp and planned.decoder.num_moe_layers:
        raise refuse(
            planned, f"ep {layout.ep} with tp {layout.tp}: ep_size must be a multiple of tp_size",
            f"plan with --ep {layout.tp}, or --tp 1",
        )  # fmt: skip
    if layout.ep > 1 and layout.dispatcher == "all_gather" and layout.ep != layout.tp:
        raise refuse(
            planned, f"the dispatcher all_gather with ep {layout.ep} and tp {layout.tp}: "
            "all_reduce needs ep_size == tp_size",
            "plan with --dispatcher all_to_all",
        )  # fmt: skip


def _not_expressed(planned: Planned) -> Iterator[str]:
    yield from planned.modules()[1]
    if planned.layout.tp > 1:
        yield "sequence parallelism beside tp, which transformers reserves and does not run yet"
    if planned.decoder.predictions:
        yield "multi-token prediction, which transformers does not train"
    yield f"sequences of {planned.job.length} tokens: the data's collator makes them"
