"""Megatron-LM: a shell script with the arguments of `pretrain_gpt.py` at core_v0.16.1."""

from collections.abc import Iterator

from moetune.export.megatron_values import Value, megatron_values, stage_letters
from moetune.export.planned import Export, Planned, remarks

_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
"""Fields whose flag has another name."""
_FILE = "megatron_layout.sh"
_MODEL = (
    "Give the model's, the data's and the optimizer's arguments behind the script's name; "
    "it passes them on."
)
_SMS = "The dispatcher's multiprocessors are Megatron-Core's default."
_DELAYED = "Delayed weight gradients need --transformer-impl transformer_engine, 2.8 or newer."


def megatron_export(planned: Planned) -> Export:
    """Return the script; its own arguments are the model's and the data's."""
    values = megatron_values(planned)
    lines = "".join(f"    {line}\n" for line in _arguments(planned))
    notes = {"delay_wgrad_compute": _DELAYED}
    if planned.layout.has_usual_sms:
        notes = {"moe_flex_dispatcher_backend": _SMS, **notes}
    said = (note for field, note in notes.items() if field in values.model)
    command = f"{planned.torchrun} pretrain_gpt.py"
    text = (
        "#!/usr/bin/env bash\n"
        f"{remarks(planned, (), _MODEL, *said)}"
        "set -euo pipefail\n"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={values.max_connections}\n"
        f"LAYOUT=(\n{lines})\n"
        f'{command} "${{LAYOUT[@]}}" "$@"\n'
    )
    return Export(
        text=text, file_name=_FILE, launch=f"bash {_FILE} MODEL_AND_DATA_ARGUMENTS",
    )  # fmt: skip


def _arguments(planned: Planned) -> Iterator[str]:
    values, job = megatron_values(planned), planned.job
    for field, value in values.model.items():
        if field != "cpu_offloading":  # follows from its number of layers
            yield from _argument(field, value)
    if planned.layout.pp > 1:
        yield f"--pipeline-model-parallel-layout '{stage_letters(planned)}'"
    yield f"--micro-batch-size {planned.layout.micro_batch}"
    yield f"--global-batch-size {job.global_batch}"
    yield f"--seq-length {job.length}"
    yield "--bf16"
    for field, value in values.ddp.items():
        yield from _argument(field, value)
    for field, value in values.optimizer.items():
        yield from _argument(field, value)
    if not values.reduces_in_fp32:
        yield "--grad-reduce-in-bf16"
    if "use_megatron_fsdp" in values.ddp:
        yield "--ckpt-format fsdp_dtensor"
        yield "--no-gradient-accumulation-fusion"


def _argument(field: str, value: Value) -> Iterator[str]:
    flag = _FLAGS.get(field, "--" + field.replace("_", "-"))
    match value:
        case bool() | None:
            if value:
                yield flag
        case tuple():
            yield f"{flag} {' '.join(value)}"
        case _:
            yield f"{flag} {value}"
